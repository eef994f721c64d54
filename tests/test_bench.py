"""The benchmark runner on tiny cases: it refuses what is wrong, and its ratios, floors and comparisons are right."""

import copy
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from conditioned_kernels import cli
from conditioned_kernels.bench import compare, growth, jacobian, measure, monitor, peers, plot, suite, tables
from conditioned_kernels.bench.case import KAPPA, RESIDUAL, Case, Contestant, Skipped, Work
from conditioned_kernels.bench.machine import Rates, measured_rates, peak_memory
from conditioned_kernels.bench.shapes import SHAPES
from conditioned_kernels.bench.spectra import SPECTRA

CPU = torch.device("cpu")
RATES = Rates(copy=1e9, matmul={"float32": 1e9, "float64": 5e8})


def pause(milliseconds):
    """A contestant's run that takes this long by the clock of :func:`clock`."""
    return lambda: milliseconds / 1e3


@pytest.fixture
def clock(monkeypatch):
    """Time as the runs tell it, so that no test depends on how busy the machine is."""
    monkeypatch.setattr(measure, "seconds", lambda run, device: (run(), None))


def right(_):
    return {RESIDUAL: 1e-7}


def case(*contestants, **more):
    return Case("job", "a job", lambda: contestants, {RESIDUAL: 1e-6}, **more)


@pytest.mark.parametrize(
    "error", [{RESIDUAL: 1.0}, {RESIDUAL: math.nan}, {"another kind": 0.0}, {}], ids=["big", "nan", "unlimited", "none"]
)
def test_ours_wrong_is_an_error(clock, error):
    with pytest.raises(measure.WrongResult, match="job: ours is"):
        measure.measure(case(Contestant("ours", pause(0), lambda _: error)))


def test_a_wrong_peer_is_listed_and_never_timed(clock):
    runs = []
    peer = Contestant("peer", lambda: runs.append(1) or 1.0, lambda _: {RESIDUAL: 1.0})
    result = measure.measure(case(Contestant("ours", pause(1), right), peer))
    assert len(runs) == 1  # for its accuracy alone
    assert result.rows[1].best is None and result.rows[1].skipped.startswith("refused, off by 1 in max |Q")


def test_a_failing_peer_is_listed_with_its_reason(clock):
    def fail():
        raise RuntimeError("no kernel image\nfurther lines")

    result = measure.measure(case(Contestant("ours", pause(1), right), Contestant("peer", fail, right)))
    assert result.rows[1].skipped == "refused, failed: no kernel image"


def test_ratios_floors_and_targets(clock):
    work = Work(bytes=2e6, flops=1e6, dtype=torch.float32)  # 2 ms of memory, 1 ms of arithmetic
    contestants = (
        Contestant("ours", pause(4), right),
        Contestant("slow", pause(20), right),
        Contestant("half", pause(5), right, share=0.5),
        Contestant("rough", pause(2), lambda _: {RESIDUAL: 0.3}, stated={RESIDUAL: 0.5}),
        Skipped("absent", "it is not installed"),
    )
    result = measure.measure(
        case(*contestants, work=work, targets={"slow": 100, "rough": 0.25}), rates=RATES, budget=0, most=3
    )
    ours, slow, half, rough, absent = result.rows
    assert (result.turns, result.bound, result.floor) == (3, "memory", 2e-3)
    assert (ours.ratio, slow.ratio, half.ratio, rough.ratio) == pytest.approx((1, 5, 2.5, 0.5))
    assert (ours.floor, slow.floor, half.floor) == pytest.approx((0.5, 0.1, 0.2))
    assert not rough.equal and rough.floor is None and rough.errors == {RESIDUAL: 0.3}
    assert absent.skipped == "it is not installed" and absent.best is None
    record = {"results": [measure.asdict(result)]}
    assert list(tables.missed(record)) == ["job: 5.0 times as fast as slow (target 100 missed)"]
    assert tables.skipped(record) == {"absent: it is not installed": ["job"]}
    text = tables.markdown(tables.result_table(record["results"][0]))
    assert "floor 2 ms (memory)" in text and "timed on 50 % of the heads" in text
    assert "| rough | 2 | (0.50, target 0.25) |" in text  # brackets: no claim
    [row] = tables.summary(record).rows
    assert row[-1] == "5.0 times as fast as slow (target 100 missed); 200 % of rough (target 400 %)"


def test_a_case_without_ours_times_nothing(clock):
    result = measure.measure(case(Skipped("ours", "no extension"), Contestant("peer", pause(1), right)))
    assert result.turns == 0 and all(row.best is None for row in result.rows)


def test_floor_takes_the_unit_that_the_device_has():
    work = Work(0, 1e9, torch.bfloat16)
    assert RATES.floor(work) == (1.0, "arithmetic")  # a CPU: half types in float32
    gpu = Rates(1e12, {"float32": 1e9, "bfloat16": 4e9, "tf32": 2e9})
    assert gpu.floor(work)[0] == 0.25
    assert gpu.floor(work._replace(dtype=torch.float32))[0] == 0.5


def test_work_is_that_of_the_algorithm():
    row = suite.Row("gpt2", "qk", (2, 12))
    heads = 2 * 12 * 2
    assert row.heads(CPU) == heads
    assert row.work(CPU, passes=2, products=2) == Work(2 * heads * 768 * 64 * 4, 4 * heads * 768 * 64**2, torch.float32)
    assert row.heads(torch.device("cuda")) == 12 * 12 * 2


def test_the_machine_is_measured():
    rates = measured_rates(CPU, repeats=1)
    assert 1e8 < rates.copy < 1e13
    assert set(rates.matmul) == {"float32", "float64"}
    assert all(1e8 < rate < 1e14 for rate in rates.matmul.values())


def test_peak_memory_of_a_call():
    extra = peak_memory(lambda: torch.ones(64 << 18), CPU)  # 64 MiB
    if extra is None:
        pytest.skip("the peak of this system's resident memory cannot be restarted")
    assert 60 << 20 < extra < 80 << 20


@pytest.mark.parametrize(
    ("name", "library", "attribute"), [("gpt2", "GPT2Config", "n_embd"), ("vit-b", "ViTConfig", "")]
)
def test_shapes_are_those_of_the_configurations(name, library, attribute):
    config = getattr(pytest.importorskip("transformers"), library)()
    shape = SHAPES[name]
    assert (shape.layers, shape.q, shape.width) == (
        config.num_hidden_layers,
        config.num_attention_heads,
        config.hidden_size,
    )


@pytest.mark.parametrize(
    ("name", "library"), [("llama-7b", "LlamaConfig"), ("gemma-7b", "GemmaConfig"), ("gemma2-2b", "Gemma2Config")]
)
def test_grouped_shapes_are_those_of_the_configurations(name, library):
    config = getattr(pytest.importorskip("transformers"), library)()
    shape = SHAPES[name]
    assert shape[1:6] == (
        config.num_hidden_layers,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.hidden_size,
    )


def test_every_shape_says_where_it_comes_from():
    assert all(len(shape.source) > 10 for shape in SHAPES.values())
    assert all(
        each.source
        for each in measure.chosen(CPU, ["orthogonalize", "semi_orthogonal", "condition_number"])
        if each.name != "samples"
    )


@pytest.mark.parametrize(("name", "kappa"), [("clustered", 1 / 0.9), ("kappa 1e3", 1e3)])
def test_spectra_are_what_they_say(name, kappa):
    sigma = torch.linalg.svdvals(SPECTRA[name](4, 96, 16, CPU).double())
    torch.testing.assert_close(sigma[:, 0] / sigma[:, -1], torch.full((4,), kappa).double(), rtol=1e-4, atol=0)


def test_rank_deficient_is_exactly_so():
    weights = SPECTRA["rank deficient"](2, 32, 8, CPU)
    assert torch.equal(weights[..., 0], weights[..., -1])


@pytest.fixture
def tiny(monkeypatch):
    """Every group at a size that takes no time."""
    shape = SHAPES["gpt2"]._replace(name="tiny", layers=1, q=2, kv=1, head_dim=4, width=16)
    for module in (suite, jacobian, monitor):
        monkeypatch.setattr(module, "SHAPES", dict.fromkeys(SHAPES, shape))
    monkeypatch.setattr(jacobian, "TOKENS", 3)
    monkeypatch.setattr(monitor, "training_step", lambda device: Skipped(monitor.STEP, "it takes seconds"))
    monkeypatch.setattr(suite, "GROUPS", {name: make for name, make in suite.GROUPS.items() if name != "checkpoint"})
    monkeypatch.setattr(growth, "CALLS", 2)
    monkeypatch.setattr(
        growth,
        "AXES",
        {"heads": ((2, 8, 4), (1, 4, 16)), "rows": ((2, 8, 4), (1, 4, 16)), "cols": ((2, 32, 4), (1, 2))},
    )
    monkeypatch.setattr(measure, "measured_rates", lambda device: RATES)


def test_every_case_is_right_and_measured(tiny):
    """All groups, each contestant that can run here; 4-wide heads of a 16-wide model."""
    record = measure.run(CPU, budget=0, most=1)
    names = [result["name"] for result in record["results"]]
    assert len(names) == len(set(names)) >= 20
    for result in record["results"]:
        ours = result["rows"][0]
        assert ours["best"] > 0 or ours["skipped"], result["name"]
    text = tables.as_markdown(json.loads(measure.as_json(record)))
    assert "emerging_optimizers is not installed" in text or sys.version_info >= (3, 12)
    assert "| condition_number | rows |" in text


def record_with(**ratios):
    rows = [{"contestant": "ours", "ratio": 1.0, "equal": True}]
    rows += [{"contestant": name, "ratio": ratio, "equal": name != "rough"} for name, ratio in ratios.items()]
    return {"results": [{"name": "job", "rows": rows}]}


@pytest.mark.parametrize(
    ("new", "says"),
    [
        ({"svd": 4.0, "qr": 2.0, "rough": 5.0}, []),
        ({"svd": 3.2, "qr": 9.0, "rough": 0.1}, []),
        ({"svd": 2.0, "qr": 2.0, "rough": 5.0}, ["job: svd takes 2.00 times as long as ours, it took 4.00 times"]),
        ({"qr": 2.0}, ["job: svd took 4.00 times as long as ours and is no longer measured"]),
    ],
    ids=["same", "within tolerance, and a rough peer is no claim", "slower", "gone"],
)
def test_regressions_are_found_by_ratio(new, says):
    assert list(compare.regressions(record_with(svd=4.0, qr=2.0, rough=5.0), record_with(**new))) == says


def test_cases_that_were_not_run_are_not_compared():
    old = record_with(svd=4.0)
    other = {"results": [{"name": "other", "rows": [{"contestant": "ours", "ratio": 1.0, "equal": True}]}]}
    assert not list(compare.regressions(old, {"results": [*old["results"], *other["results"]]}))
    with pytest.raises(ValueError, match="nothing was compared"):
        list(compare.regressions(old, other))


def test_fit():
    assert growth.fit([1, 10, 100], [2, 20, 200]) == pytest.approx((1, 1))
    assert growth.fit([1, 10, 100], [3, 300, 30000]) == pytest.approx((2, 1))
    assert growth.fit([1, 2, 4, 8], [1, 4, 1, 4])[1] < 0.5


def test_growth_spans_three_decades_in_flat_memory(monkeypatch):
    monkeypatch.setattr(growth, "MOST", 0.0)  # one run per size; how long it takes is for the benchmark to say
    found = growth.measure_growth("condition_number", "heads", CPU)
    assert found.sizes[-1] == 1000 * found.sizes[0]
    if found.memory[-1] is None:
        pytest.skip("the peak of this system's resident memory cannot be restarted")
    assert found.memory[-1] < 1.5


def test_turns_share_the_budget(clock):
    fast = case(Contestant("ours", pause(100), right), Contestant("peer", pause(300), right))
    assert measure.measure(fast, budget=4).turns == 10
    assert measure.measure(fast, budget=0).turns == 3
    assert measure.measure(fast, budget=1e9).turns == 25


def test_peers_that_are_absent_or_elsewhere_are_skipped_with_a_reason(monkeypatch):
    weights = torch.randn(2, 16, 4)
    monkeypatch.setitem(sys.modules, "geotorch", None)
    absent = peers.contestant(peers.Peer("g", "random", peers.orthogonal_loop, "geotorch"), weights, lambda _: right)
    assert isinstance(absent, Skipped) and "pip install 'conditioned_kernels[bench]'" in absent.reason
    elsewhere = peers.contestant(
        peers.Peer("c", "qr", peers.orthogonal_loop, devices=("cuda",)), weights, lambda _: right
    )
    assert elsewhere == Skipped("c", "it runs on cuda only, not on cpu")
    large = peers.contestant(peers.Peer("l", "qr", peers.orthogonal_loop, few={"cpu": 10}), weights, lambda _: right)
    assert isinstance(large, Skipped) and "16x4" in large.reason
    some = peers.contestant(
        peers.Peer("s", "random", peers.orthogonal_loop, few={"cpu": 300}), weights, lambda _: right
    )
    assert some.share == 0.5 and some.run().shape == (1, 16, 4)


def test_peers_of_half_types_go_through_float32():
    weights = torch.randn(2, 16, 4).bfloat16()
    made = peers.contestant(peers.Peer("p", "polar", lambda w: lambda: peers.svd_polar(w)), weights, lambda _: right)
    assert made.run().dtype == torch.bfloat16


def test_muons_iteration_leaves_kappa_1_5():
    """Stated in the table, and why it is no peer of equal accuracy."""
    weights = torch.randn(3, 256, 32, generator=torch.Generator().manual_seed(0))
    muon = next(peer for peer in peers.PEERS if "Muon" in peer.name)
    sigma = torch.linalg.svdvals(muon.make(weights)().double())
    assert 1.2 < float((sigma[:, 0] / sigma[:, -1]).max()) < 2.0
    assert muon.stated


@pytest.fixture
def run(capsys, monkeypatch):
    def call(*args):
        monkeypatch.setattr(sys, "argv", ["conditioned-kernels", *map(str, args)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        out, err = capsys.readouterr()
        return stopped.value.code, " ".join(out.split()), " ".join(err.split())

    return call


def test_command_measures_writes_plots_and_compares(run, tiny, tmp_path):
    first, png = tmp_path / "a.json", tmp_path / "a.png"
    groups = ("--group", "condition_number", "--group", "growth", "--budget", 0, "--turns", 1)
    code, out, err = run("bench", *groups, "--json", first, "--plot", png)
    assert code == 0, err
    assert "times ours" in out and "exponent" in out and "not timed:" in out
    assert png.read_bytes().startswith(b"\x89PNG")
    record = json.loads(first.read_text())
    assert {result["group"] for result in record["results"]} == {"condition_number"}
    assert record["environment"]["backend"] in ("extension", "torch") and record["rates"]["copy"] == 1e9

    doctored = copy.deepcopy(record)
    for row in doctored["results"][0]["rows"]:
        if row["contestant"] == "linalg.cond":
            row["ratio"] = 1e6
    (tmp_path / "old.json").write_text(json.dumps(doctored))
    code, out, _ = run("bench", *groups, "--compare", tmp_path / "old.json")
    assert code == 1
    assert f"regression: {doctored['results'][0]['name']}: linalg.cond takes" in out


def test_command_lists_cases(run):
    code, out, _ = run("bench", "--list", "--group", "stages")
    assert code == 0 and "stage polar" in out and "orthogonalize polar" not in out


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--group", "nothing"], "group must be one of orthogonalize"),
        (["--case", "nothing"], "no case 'nothing'; --list lists the cases"),
        (["--device", "tpu"], "device must be cpu or a CUDA device"),
        (["--device", "cuda:99"], "CUDA devices"),
        (["--compare", "nothing.json"], "--compare: cannot read nothing.json"),
        (["--compare", "pyproject.toml"], "is no record of a benchmark"),
        (["--group", "stages", "--plot", "x.png"], "add --group growth"),
        (["--json", "/nowhere/a.json"], "the folder /nowhere does not exist"),
        (["--json", "tests", "--force"], "tests is a folder"),
    ],
)
def test_command_errors(run, args, says, monkeypatch):
    monkeypatch.chdir(Path(__file__).resolve().parent.parent)
    monkeypatch.setattr(measure, "measured_rates", lambda device: pytest.fail("it measured"))
    code, _, err = run("bench", *args)
    assert code == 2 and says in err


def test_a_record_with_a_number_json_lacks():
    assert json.loads(measure.as_json({"a": [math.inf, 1.0, (math.nan,)]})) == {"a": [None, 1.0, [None]]}


def test_plot_needs_growth():
    with pytest.raises(ValueError, match="--group growth"):
        plot.scaling_figure({"environment": {}, "results": []})


def test_kappa_of_a_checkpoint_is_that_of_float64():
    contestants = suite.checkpoint_contestants()
    if isinstance(contestants[0], Skipped):
        pytest.skip(contestants[0].reason)
    errors = contestants[0].errors(contestants[0].run())
    assert errors[KAPPA] < 1e-4


def test_peak_of_a_program_is_its_own_and_not_that_of_the_one_that_ran_it():
    """A child's ru_maxrss starts at what its parent had; benchmarks.sharded has the child say its VmHWM."""
    from benchmarks.sharded import COMMAND

    ballast = torch.ones(300_000_000)
    said = subprocess.run([sys.executable, "-c", COMMAND, "version"], stdout=subprocess.PIPE, text=True, check=True)
    version, peak = said.stdout.splitlines()
    assert version.startswith("conditioned_kernels") and 50e6 < int(peak) < ballast.nbytes
