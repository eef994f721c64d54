"""The page of a monitored run: what it shows is what the run measured, and it opens without a network."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from conditioned_kernels.integrations.files import JsonlSink, read_records
from conditioned_kernels.monitor import ConditioningMonitor, Record, pictures
from conditioned_kernels.monitor.run_report import run_html

pytest.importorskip("matplotlib", reason="matplotlib is not installed")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the records of a short run: a head that dies, Jacobians, layers in turn."""
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ConditioningMonitor(
        model, sinks=[JsonlSink(folder / "run.jsonl")], activations_every=3, tokens=4, layers_per_step=2
    ) as monitor:
        for step in range(8):
            model(torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 6:
                with torch.no_grad():
                    model.layers[1].self_attn.in_proj_weight[:8] = 0
            monitor.step()
    return folder


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str]]:
    """Run the command; returns (exit code, standard error)."""
    cli = pytest.importorskip("conditioned_kernels.cli", reason="the command line's libraries are not installed")

    def call(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["conditioned-kernels", "report", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        return int(stopped.value.code or 0), capsys.readouterr().err

    return call


def test_the_command_writes_one_self_contained_page(
    run: Path, tmp_path: Path, report: Callable[..., tuple[int, str]]
) -> None:
    page = tmp_path / "page.html"
    code, error = report(run, "--out", page)
    assert code == 0, error
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"""(src|href)\s*=\s*(?!["']?data:)|url\(|@import|<script""", text)
    assert text.count("data:image/png;base64,") == 4
    for heading in ("Heads over training", "Worst head of each layer", "Spectra", "Worst heads at the end"):
        assert f"<h2>{heading}</h2>" in text
    assert "Attention Jacobian" in text and "layers.1.self_attn" in text and "zero matrix" in text
    records = read_records(run)
    assert f"{len(records)} records of 3 attention layers, from step 0 to step 8" in text
    code, error = report(run, "--out", page)
    assert code == 2 and "--force" in error
    assert report(run / "run.jsonl", "--out", page, "--force")[0] == 0
    code, error = report(run / "nothing.jsonl")
    assert code == 2 and "nothing.jsonl" in error


def test_pictures_show_the_records(run: Path) -> None:
    records = read_records(run)
    assert pictures.moments(records) == [0, 4, 8]
    last = pictures.latest(records, 8)
    assert len(last) == 3 * 3 * 2
    for (layer, projection, head), record in last.items():
        steps = [
            each.step
            for each in records
            if (each.layer, each.projection, each.head) == (layer, projection, head) and not each.spectrum
        ]
        assert record.step == max(steps)
    curves = pictures.weight_curves(records)
    assert set(curves) == {"W_Q, worst head", "W_K, worst head", "W_V, worst head"}
    for layer, points in curves["W_K, worst head"].items():
        for step, value in points:
            heads = [
                each.kappa
                for each in records
                if (each.step, each.layer, each.projection) == (step, layer, "k") and not each.spectrum
            ]
            assert value == max(heads)
    dead = [each for each in records if each.layer == "layers.1.self_attn" and each.projection == "q" and each.step > 6]
    assert {each.kappa for each in dead if not each.spectrum and each.head == 0} == {math.inf}
    assert all(math.isfinite(value) for points in curves["W_Q, worst head"].values() for _, value in points)
    jacobian = pictures.jacobian_curves(records)
    assert set(jacobian) == {"kappa(J)", "formula of B(J), no bound here"}
    figure = pictures.heat_maps(records, [0, 8])
    shown = [image.get_array() for axis in figure.axes for image in axis.get_images()]
    assert len(shown) == 6 and all(image.shape == (3, 2) for image in shown)
    values = [last["layers.2.self_attn", "v", head].kappa for head in (0, 1)]
    assert shown[-1][2].tolist() == pytest.approx([math.log10(value) for value in values])
    lines = pictures.spectra_figure(records).axes[0].get_lines()
    spectrum = next(each.spectrum for each in records if each.spectrum)
    assert list(lines[0].get_ydata()) == list(spectrum)


def test_odd_runs(tmp_path: Path) -> None:
    """Only Jacobians, only reasons, one step, nothing finite, names that are markup."""
    name = "<b>&\x1b[31m"
    for records in (
        [Record(4, name, "jacobian", 0, kappa=3.0, effective=3.0, bound=9.0, theorem=True)],
        [Record(0, name, "jacobian", -1, status=name)],
        [Record(7, name, "q", 0, kappa=2.0, low=2.0, high=2.0)],
        [Record(7, name, "q", 0, kappa=math.nan), Record(8, name, "k.rope", 0, kappa=math.inf)],
        [Record(7, name, "q", 0, status="non_finite", spectrum=each) for each in ((), (math.nan, math.nan))],
        [Record(7, name, "$\\frac{$", 0, kappa=2.0, spectrum=each) for each in ((), (2.0, 1.0))],
    ):
        run_html(tmp_path / "page.html", name, records)
        text = (tmp_path / "page.html").read_text(encoding="utf-8")
        assert name not in text and "\x1b" not in text and "&lt;b&gt;&amp;" in text
    axes = pictures.heat_maps([Record(7, name, "q", 0, kappa=2.0)], [7]).axes[0]
    assert all(float(tick).is_integer() for tick in (*axes.get_xticks(), *axes.get_yticks()))  # one layer, one head
    with pytest.raises(ValueError, match="no records"):
        run_html(tmp_path / "page.html", "run", [])


def test_the_page_opens_offline_in_a_browser(run: Path, tmp_path: Path) -> None:
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no chromium")
    run_html(tmp_path / "page.html", "run", read_records(run))
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    # A name server that answers nothing stands for no network.
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", "--dump-dom", (tmp_path / "page.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("<img") == 4 and "Attention Jacobian" in done.stdout
