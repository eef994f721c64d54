"""The results in words, tables and plots; every conclusion follows from the numbers by a rule stated beside it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from .figures import draw
from .models import MODELS
from .paper import PAPER_RESULTS
from .schemes import SCHEMES
from .statistics import LEVEL, Interval, paired
from .store import RESULTS
from .suites import SUITES
from .summary import Row, Summary, summaries
from .tasks import TASKS

SHOWN = ("conditioned", "qk", "preserve", "mimetic")
"""The columns of the README's table beside the recommendation."""

CONTRASTS = (
    ("qk", "conditioned", "W_V: kept, against the paper's identity at scale 1"),
    ("v-preserve", "conditioned", "scale of W_V: the identity at the default's norm, against scale 1"),
    ("v-preserve", "qk", "shape of W_V at the default's norm: the identity, against random"),
    ("repeat", "conditioned", "W_V: one identity repeated, against each head its own coordinates"),
    ("qk", "qk-rescaled", "spectrum of W_Q, W_K at scale 1: semi-orthogonal, against random"),
    ("qk-rescaled", "default", "scale of W_Q, W_K with random spectrum: 1, against the default's"),
    ("preserve", "default", "spectrum of all three at the default's norms: flat, against random"),
    ("redraw", "default", "the same distribution drawn again, which must show nothing"),
)
"""Pairs of schemes that differ in one thing, and which."""


def write_report(folder: Path = RESULTS) -> str:
    """Write README.md and one plot per suite into ``folder``; returns what was written."""
    found = summaries(folder)
    names = [draw(summary, folder / f"{summary.name}.png") for summary in found]
    (folder / "README.md").write_text(full_text(found), encoding="utf-8")
    return f"{folder}: README.md, {', '.join(names)}"


def readme_text(folder: Path = RESULTS) -> str:
    """The generated part of the repository's README."""
    found = summaries(folder)
    if not found:
        return "No suite is finished yet."
    return "\n\n".join(
        [_protocol(found), _recommendations(found), _beside_the_paper(found), *_conclusions(found), _limits(found)]
    )


def verdict_text(folder: Path = RESULTS) -> str:
    """The one sentence near the top of the repository's README."""
    found = summaries(folder)
    if not found:
        return "Does it help training? The paper reports that it does; no suite of this package is finished yet."
    return (
        "Does it help training? The paper reports that it does, on vision models, BERT and long sequences. In this "
        f"package's own small experiments, against the models' own initialization, it is {_verdicts(found)}. "
        "[Below](#does-it-help-training): which variant to take for which kind of model, and where the evidence ends."
    )


def full_text(found: Sequence[Summary]) -> str:
    """All tables, for the results folder."""
    parts = [
        "# Results of the experiments",
        "Written by `python -m benchmarks.experiments report`; each suite names the command that trained its runs.",
        _protocol(found),
        *(_suite_text(summary) for summary in found),
        "## Differences in one thing",
        "Paired by seed, each scheme at its own best rate; positive accuracy and negative loss favor the first.",
        _contrasts(found),
    ]
    return "\n\n".join(parts) + "\n"


def _protocol(found: Sequence[Summary]) -> str:
    runs = sum(summary.runs for summary in found)
    hours = sum(summary.processor_seconds for summary in found) / 3600
    return (
        f"{runs} training runs, {hours:.1f} processor hours. Every scheme is tried at the learning rates of its suite "
        "on the first seeds and then trained at the one with the best mean on all seeds; runs of one seed share the "
        "model's own initialization, the split and the order of the data. Differences are paired by seed, with their "
        f"{LEVEL:.0%} t-interval; *better* and *worse* mean that the interval excludes 0, and nothing else. One "
        "comparison in twenty with no true difference is called one by this rule."
    )


def _suite_text(summary: Summary) -> str:
    suite, task = summary.suite, TASKS[summary.suite.task]
    rates = ", ".join(f"{rate:g}" for rate in suite.rates)
    text = [
        f"## {MODELS[suite.model].title}; {task.title}, {suite.steps} steps",
        f"`python -m benchmarks.experiments run {summary.name}`: {suite.steps} AdamW steps of {suite.batch}, rates "
        f"{rates} on {suite.sweep} seeds, {suite.seeds} seeds at the best; {summary.runs} runs, "
        f"{summary.processor_seconds / 60:.0f} processor minutes. Metric: validation {task.metric}. Data: "
        f"{task.source}.",
        _main_table(summary),
        _jacobian_table(summary),
        f"![curves]({summary.name}.png)",
    ]
    if summary.unfinished:
        names = "; ".join(SCHEMES[name].title for name in summary.unfinished)
        text.append(f"Not run, or not on all seeds: {names}.")
    return "\n\n".join(part for part in text if part)


def _main_table(summary: Summary) -> str:
    total = summary.suite.steps
    rows = []
    for row in summary.rows:
        reached = sum(math.isfinite(step) for step in row.steps)
        rows.append(
            {
                "initialization": SCHEMES[row.scheme].title,
                "rate": f"{row.rate:g}",
                "final": _value(summary, row.final) + (f", {row.diverged} diverged" if row.diverged else ""),
                "minus default, best rates": _judged(summary, row.best),
                f"minus default, both at {summary.rows[0].rate:g}": _same_rate(summary, row),
                "default's final metric at step (median)": _steps(row, total) + f", {reached} of {len(row.steps)}",
            }
        )
    return _table(rows)


def _jacobian_table(summary: Summary) -> str:
    rows = []
    for row in summary.rows:
        if row.jacobian:
            start, end = row.jacobian[0], row.jacobian[-1]
            weights = ", ".join(
                f"{row.weights['start'][role]['median']:.2f} → {row.weights['end'][role]['median']:.2f}"
                for role in ("q", "k", "v")
            )
            rows.append(
                {
                    "initialization": SCHEMES[row.scheme].title,
                    "κ(J), start → end": f"{_size(start['kappa'])} → {_size(end['kappa'])}",
                    "bound, start → end": f"{_size(start['bound'])} → {_size(end['bound'])}",
                    "κ of W_Q, W_K, W_V, start → end": weights,
                }
            )
    if not rows:
        return ""
    return "κ(J) of the middle layer on 16 tokens, median over its heads, last seed:\n\n" + _table(rows)


def _recommendations(found: Sequence[Summary]) -> str:
    rows = []
    for summary in found:
        top, equal = summary.recommended(), summary.equals()
        code = SCHEMES[top.scheme].code
        words = SCHEMES[top.scheme].title + (f": `{code}`" if code else "")
        if equal:
            words += "; not shown to differ: " + "; ".join(SCHEMES[row.scheme].title for row in equal)
        title = f"{MODELS[summary.suite.model].title}; {TASKS[summary.suite.task].title}, {summary.suite.steps} steps"
        row = {"model; task": title, "seeds": str(summary.suite.seeds), "take": words}
        for scheme in SHOWN:
            found_row = summary.row(scheme)
            row[SCHEMES[scheme].title] = _judged(summary, found_row.best) if found_row else "not run"
        rows.append(row)
    return (
        "**Which to take.** The initialization with the best mean among those that are better than the model's own, "
        "and the model's own where none is. The other columns are the final validation accuracy in points (more is "
        "better) or loss in nats (less is better) minus the default's.\n\n" + _table(rows)
    )


def _beside_the_paper(found: Sequence[Summary]) -> str:
    rows = [
        {"": "paper", "model, task": name, "default": default, "mimetic": mimetic, "conditioned": conditioned}
        | {"default's final metric at": at}
        for name, default, mimetic, conditioned, at in PAPER_RESULTS
    ]
    for summary in found:
        row = {"": "here", "model, task": _name(summary)}
        for scheme in ("default", "mimetic", "conditioned"):
            entry = summary.row(scheme)
            row[scheme] = _value(summary, entry.final) if entry else ""
        entry = summary.row("conditioned")
        steps = f"{_steps(entry, summary.suite.steps)} of {summary.suite.steps} steps" if entry else ""
        rows.append(row | {"default's final metric at": steps})
    title = "**Beside the paper's own results** (epochs there, steps here; ± is the interval over seeds).\n\n"
    return title + _table(rows)


def _conclusions(found: Sequence[Summary]) -> list[str]:
    lines = [
        "- The paper finds its initialization (conditioned, block) ahead of the default on every task. Here it is "
        f"{_verdicts(found)}."
    ]
    if mimetic := _verdicts(found, "mimetic"):
        lines.append(f"- The paper finds it ahead of mimetic initialization on every task. Here it is {mimetic}.")
    better = [summary for summary in found if summary.verdict("conditioned") == "better"]
    if better:
        steps = [f"{_steps(row, s.suite.steps)} on {_name(s)}" for s in better if (row := s.row("conditioned"))]
        lines.append(
            "- In the paper it has the default's final accuracy after 69 to 80 % of the epochs. Where it is better "
            f"here, at step (median): {'; '.join(steps)}."
        )
    lines += [line for summary in found if (line := _rank_line(summary))]
    table = _contrasts(found)
    return ["**What agrees with the paper and what does not.**\n\n" + "\n".join(lines)] + (
        ["What makes the difference, one thing at a time:\n\n" + table] if table else []
    )


def _verdicts(found: Sequence[Summary], reference: str = "default") -> str:
    """On which suites the paper's initialization is better than ``reference``, worse, and neither, by the rule."""
    words = {"better": "better on", "worse": "worse on", "no difference shown": "not shown to differ on"}
    names: dict[str, list[str]] = {word: [] for word in words}
    for summary in found:
        ours, other = summary.row("conditioned"), summary.row(reference)
        difference = paired(ours.values, other.values) if ours and other else None
        if difference is not None:
            names[difference.verdict(higher_is_better=summary.higher_is_better)].append(_name(summary))
    return "; ".join(f"{words[word]} {', '.join(on)}" for word, on in names.items() if on)


def _rank_line(summary: Summary) -> str:
    """Whether kappa(J) at the start orders the schemes as their results do."""
    rows = [row for row in summary.rows if row.jacobian and row.jacobian[0]["kappa"] and row.jacobian[0]["bound"]]
    if len(rows) < 5:
        return ""
    from scipy.stats import spearmanr

    sign = 1 if summary.higher_is_better else -1
    results = [sign * row.final.mean for row in rows]
    kappa, bound = (
        float(spearmanr([-row.jacobian[0][name] for row in rows], results).statistic) for name in ("kappa", "bound")
    )
    return (
        f"- {_name(summary)}: rank correlation over {len(rows)} initializations between a small value at the start and "
        f"a good result: {kappa:+.2f} for the exact κ(J), {bound:+.2f} for its bound."
    )


def _contrasts(found: Iterable[Summary]) -> str:
    chosen = [summary for summary in found if len(summary.rows) > 4]
    rows = []
    for first, second, words in CONTRASTS:
        row = {"one difference": words}
        for summary in chosen:
            a, b = summary.row(first), summary.row(second)
            row[_name(summary)] = _judged(summary, paired(a.values, b.values)) if a and b else "not run"
        if set(list(row.values())[1:]) - {"not run"}:
            rows.append(row)
    return _table(rows) if rows else ""


def _limits(found: Sequence[Summary]) -> str:
    steps = max(summary.suite.steps for summary in found)
    least, most = (f(summary.suite.seeds for summary in found) for f in (min, max))
    single = [_name(summary) for summary in found if len(summary.suite.rates) == 1]
    missing = [name for name in SUITES if name != "smoke" and name not in {summary.name for summary in found}]
    unfinished = {
        _name(summary): [SCHEMES[name].title for name in summary.unfinished] for summary in found if summary.unfinished
    }
    text = (
        f"**Where the evidence ends.** Small models (their sizes are above), at most {steps} steps, {least} to {most} "
        "seeds, one optimizer (AdamW, warm-up, cosine), no dropout; nothing here is at the paper's scale or trained to "
        "convergence. The best rate is chosen on the same validation data as the result, for every scheme alike."
    )
    if single:
        text += f" One learning rate only: {'; '.join(single)}."
    if missing:
        text += f" Defined but not run: {', '.join(missing)}."
    for name, titles in unfinished.items():
        text += f" Not run on {name}: {'; '.join(titles)}."
    return text


def _name(summary: Summary) -> str:
    """Short, and of two suites on one model and task the steps too."""
    suite = summary.suite
    name = f"{MODELS[suite.model].title.split(',')[0]} on {TASKS[suite.task].title}"
    twins = [other for other in SUITES.values() if (other.task, other.model) == (suite.task, suite.model)]
    return f"{name} ({suite.steps} steps)" if len(twins) > 1 else name


def _value(summary: Summary, interval: Interval) -> str:
    if summary.higher_is_better:
        return f"{100 * interval.mean:.1f} ± {100 * interval.half:.1f} %"
    return f"{interval.mean:.3f} ± {interval.half:.3f}"


def _judged(summary: Summary, interval: Interval | None) -> str:
    if interval is None:
        return ""
    word = interval.verdict(higher_is_better=summary.higher_is_better)
    shown = "" if word == "no difference shown" else f", {word}"
    if summary.higher_is_better:
        return f"{100 * interval.mean:+.1f} ± {100 * interval.half:.1f}{shown}"
    return f"{interval.mean:+.3f} ± {interval.half:.3f}{shown}"


def _same_rate(summary: Summary, row: Row) -> str:
    if row.same is None:
        return ""
    missing = row.same.number < len(row.values)
    return _judged(summary, row.same) + (f" ({row.same.number} seeds)" if missing else "")


def _steps(row: Row, total: int) -> str:
    step = row.median_step
    return f"{step:.0f} ({100 * step / total:.0f} %)" if math.isfinite(step) else "not reached"


def _size(value: float | None) -> str:
    return "∞" if value is None else f"{value:.1e}".replace("e+0", "e").replace("e+", "e")


def _table(rows: Sequence[Mapping[str, str]]) -> str:
    names = list(rows[0])
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    lines += ["| " + " | ".join(row.get(name, "") for name in names) + " |" for row in rows]
    return "\n".join(lines)
