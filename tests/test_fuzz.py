"""What comes from outside, files, names and arguments, at random: never a traceback, and nothing in it acts."""

import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from html.parser import HTMLParser
from io import StringIO
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from conditioned_kernels import cli, report, sources
from conditioned_kernels.checkpoint import Checkpoint, CheckpointError

ENCODER = "torch:encoder-1x8x2"
GOOD = save({"weight": torch.ones(4, 6), "bias": torch.zeros(3, dtype=torch.bfloat16)}, {"format": "pt"})
HEADER = json.loads(GOOD[8 : 8 + int.from_bytes(GOOD[:8], "little")])
FEW = settings(max_examples=40)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


def read(path):
    """Everything a command reads of a checkpoint; only CheckpointError may leave."""
    try:
        with Checkpoint(path) as checkpoint:
            for name, entry in checkpoint.entries.items():
                value = checkpoint.tensor(name)
                assert (tuple(value.shape), value.dtype) == (entry.shape, entry.dtype)
        return True
    except CheckpointError:
        return False


@settings(max_examples=120)
@given(data=st.binary(max_size=200), suffix=st.sampled_from((".safetensors", ".pt", ".bin")))
@example(b"", ".pt")
@example(b"PK\x03\x04", ".pt")
@example(b"\x80\x04\x95", ".bin")
def test_any_bytes_are_read_or_refused(folder, data, suffix):
    path = folder / f"any{suffix}"
    path.write_bytes(data)
    read(path)


@settings(max_examples=120)
@given(edits=st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.binary(max_size=6), st.integers(0, 6)), max_size=4))
def test_spliced_files_are_read_or_refused(folder, edits):
    data = GOOD
    for place, insert, cut in edits:
        data = data[:place] + insert + data[place + cut :]
    path = folder / "spliced.safetensors"
    path.write_bytes(data)
    assert read(path) or data != GOOD


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(("F32", "BF16", "F4", "F8_E8M0", "C64", "BOOL", "?")) | VALUES,
        "shape": st.lists(st.integers(-2, 2**64), max_size=3) | VALUES,
        "data_offsets": st.lists(st.integers(-4, 200), min_size=1, max_size=3) | VALUES,
        "more": VALUES,
    },
)


@settings(max_examples=100)
@given(
    header=st.dictionaries(st.sampled_from(("weight", "bias", "__metadata__", "x")), FIELDS | VALUES, max_size=3),
    replaced=st.booleans(),
)
def test_any_header_is_read_or_refused(folder, header, replaced):
    """Headers of the right length around any content, alone or in a real file's place."""
    text = json.dumps(header if replaced else {**HEADER, **header}).encode()
    path = folder / "header.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + GOOD[-102:])
    read(path)


@FEW
@given(name=st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=30))
@example("\x1b]0;title\x07")
@example("<script>alert(1)</script>")
@example('"><img src=x onerror=alert(1)>')
@example("[bold red]x[/]")
@example("[/nothing]")
@example("\u202eevil\u2028\x9b31m")
def test_names_act_neither_in_html_nor_in_a_terminal(folder, measured, name):
    hostile = type(measured)(**{**measured.__dict__, "layer": name, "parameter": name})
    page = report.HtmlReport(name)
    page.paragraph(name)
    page.table(report.layer_table([hostile]), folded=name)
    page.write(folder / "a.html")
    seen = Tags()
    seen.feed((folder / "a.html").read_text(encoding="utf-8"))
    assert seen.tags <= TAGS
    assert not seen.handlers
    with cli.out.capture() as captured:
        cli._table(report.layer_table([hostile]))
        cli._unknown(((name, name),))
    shown = captured.get()
    assert all(character.isprintable() or character == "\n" for character in shown)
    assert report.printable(name)[:1] in shown


TAGS = set("html head meta title style body main h1 p div table thead tr th tbody td details summary".split())  # noqa: SIM905


class Tags(HTMLParser):
    """Which elements and event handlers a page has."""

    def __init__(self):
        super().__init__()
        self.tags, self.handlers = set(), []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.handlers += [name for name, _ in attrs if name.startswith("on")]


@pytest.fixture(scope="module")
def measured():
    return sources.measure_source(ENCODER)[0][0]


WORDS = st.sampled_from(
    f"""
    {ENCODER} torch:encoder-0x0x0 transformers:none timm:none python:x:y python: none.safetensors .
    --like --config --seed --heads --out --gain --value --dtype --roles --force --csv --device --group --compare --list
    --help -x -- --gain=q=1,v --seed=1.5 --seed=-1 q inf nan -1 1e400 unit fp32 a.csv cuda:9 /dev/null /proc/self/mem
    """.split()
) | st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=8)
COMMANDS = ("inspect", "init", "verify", "probe", "layouts", "backends", "version", "bench", "nothing")


@settings(max_examples=80)
@given(command=st.sampled_from(COMMANDS), arguments=st.lists(WORDS, max_size=5))
@example("verify", [ENCODER, "--gain", "nan"])
@example("verify", [ENCODER, "--gain", "inf"])
@example("init", [ENCODER, "--out", "", "--seed", "-1"])
@example("init", [ENCODER, "--out", "a\n.safetensors", "--gain", "q=1,q=2"])
@example("inspect", ["/proc/self/mem"])
@example("inspect", [ENCODER, "--csv", "/dev/null", "--force"])
@example("bench", ["--compare", "/proc/self/mem"])
@example("probe", ["python:/dev/null:f"])
def test_arguments_end_in_a_line_and_an_exit_code(folder, command, arguments):
    out, err = StringIO(), StringIO()
    with (
        mock.patch.object(sys, "argv", ["conditioned-kernels", command, *arguments]),
        mock.patch.object(cli, "out", cli.Console(file=out, width=9999)),
        mock.patch.object(cli, "err", cli.Console(file=err, width=9999)),
        mock.patch("conditioned_kernels.bench.measure.run", side_effect=ValueError("not here")),
        pytest.MonkeyPatch.context() as patch,
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        patch.chdir(folder)
        with pytest.raises(SystemExit) as stopped:
            cli.main()
    said = err.getvalue().strip()
    assert stopped.value.code in (0, 1, 2)
    assert (stopped.value.code == 2) == said.startswith("error: "), said
    assert stopped.value.code != 2 or len(said.splitlines()) == 1, said
