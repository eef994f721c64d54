"""The results in words, tables and plots; every conclusion follows from the numbers by a rule stated beside it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from . import baselines
from .figures import draw
from .models import MODELS
from .paper import PAPER_RESULTS
from .schemes import SCHEMES
from .statistics import LEVEL, NONE, WORDS, Interval, verdicts
from .store import RESULTS
from .suites import SUITES
from .summary import Row, Summary, summaries
from .tasks import TASKS

PAGE = "benchmarks/results/experiments/README.md"

CONTRASTS = (
    ("qk", "conditioned", "W_V: kept, against the paper's identity at scale 1"),
    ("v-preserve", "conditioned", "scale of W_V: the identity at the default's norm, against scale 1"),
    ("v-preserve", "qk", "shape of W_V at the default's norm: the identity, against random"),
    ("semi-v", "conditioned", "shape of W_V at scale 1: semi-orthogonal, against the identity"),
    ("repeat", "conditioned", "W_V: one identity repeated, against each head its own coordinates"),
    ("qk", "qk-rescaled", "spectrum of W_Q, W_K at scale 1: semi-orthogonal, against random"),
    ("qk-rescaled", "default", "scale of W_Q, W_K with random spectrum: 1, against the default's"),
    ("calibrated", "qk", "scale of semi-orthogonal W_Q, W_K: calibrated for κ(J), against 1"),
    ("conditioned", "xavier", "the paper's, against random of about the same scale (Xavier)"),
    ("preserve", "default", "spectrum of all three at the default's norms: flat, against random"),
    ("redraw", "default", "the same distribution drawn again, which must show nothing"),
)
"""Pairs of schemes that differ in one thing, and which."""


def write_report(folder: Path = RESULTS) -> str:
    """Write README.md and one plot per suite into ``folder``; returns what was written."""
    found = summaries(folder)
    names = [draw(summary, folder / f"{summary.name}.png") for summary in found]
    (folder / "README.md").write_text(full_text(found, baselines.read(folder)), encoding="utf-8")
    return f"{folder}: README.md, {', '.join(names)}"


def readme_text(folder: Path = RESULTS) -> str:
    """The generated part of the repository's README."""
    found = summaries(folder)
    if not found:
        return "No suite is finished yet."
    tables = baselines.read(folder)
    return "\n\n".join(
        part
        for part in (
            _recommendations(found),
            _conclusions(found, tables),
            _limits(found),
            _beside_the_paper(found, tables),
        )
        if part
    )


def verdict_text(folder: Path = RESULTS) -> str:
    """The one sentence near the top of the repository's README."""
    found = summaries(folder)
    if not found:
        return "Does it help training? The paper reports that it does; no suite of this package is finished yet."
    xavier = _verdicts(found, "xavier")
    against = f"Against Xavier for the same three weights it is {xavier}. " if xavier else ""
    return (
        "Does it help training? The paper reports that it does, on vision models, BERT and long sequences. In this "
        f"package's own small experiments, against the models' own initialization, it is {_verdicts(found)}. "
        f"{against}[Below](#does-it-help-training): which variant to take for which kind of model, and where the "
        "evidence ends."
    )


def full_text(found: Sequence[Summary], tables: Mapping[str, Mapping[str, float]]) -> str:
    """All tables, for the results folder."""
    parts = [
        "# Results of the experiments",
        "Written by `python -m benchmarks.experiments report`; each suite names the command that trained its runs.",
        _protocol(found),
        "## Differences in one thing",
        _contrasts(found),
        *(_suite_text(summary, tables.get(summary.suite.task, {})) for summary in found),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _protocol(found: Sequence[Summary]) -> str:
    runs = sum(summary.runs for summary in found)
    hours = sum(summary.processor_seconds for summary in found) / 3600
    return (
        f"{runs} training runs, {hours:.1f} processor hours. Every scheme is tried at the learning rates of its suite "
        "on the first seeds and then trained at the one with the best mean on all seeds; where a suite says so, a "
        "scheme whose best rate is the largest or smallest tried gets the next one too. Runs of one seed share the "
        "model's own initialization, the split and the order of the data. Differences are paired by seed, with their "
        f"{LEVEL:.0%} t-interval. *Better* and *worse*: significant at {1 - LEVEL:.0%} after Holm's correction over "
        "the comparisons of one suite with its default (or over one column of one table); *perhaps*: the interval "
        f"excludes 0, but not after the correction. {_chance(found)} No baseline below uses attention: each is a table "
        "of frequencies, counted on training data."
    )


def _chance(found: Sequence[Summary]) -> str:
    """How many comparisons there are, and how many differences chance alone would show."""
    family = [row.best.p for summary in found for row in summary.rows if row.best]
    shown = sum(p < 1 - LEVEL for p in family)
    firm = sum(word in ("better", "worse") for summary in found for word in summary.verdicts.values())
    return (
        f"Of {len(family)} comparisons with a default {shown} have an interval without 0, where chance alone gives "
        f"about {(1 - LEVEL) * len(family):.0f}; {firm} hold after the correction."
    )


def _suite_text(summary: Summary, tables: Mapping[str, float]) -> str:
    suite, task = summary.suite, TASKS[summary.suite.task]
    rates = ", ".join(f"{rate:g}" for rate in suite.rates)
    extended = ", extended where the best is at an end," if suite.extend else ""
    shown = [_number(summary, value) + f" from {words}" for words, value in tables.items()]
    text = [
        f"## {MODELS[suite.model].title}; {task.title}, {suite.steps} steps",
        f"`python -m benchmarks.experiments run {summary.name}`: {suite.steps} AdamW steps of {suite.batch}, rates "
        f"{rates}{extended} on {suite.sweep} seeds, {suite.seeds} seeds at the best; {summary.runs} runs, "
        f"{summary.processor_seconds / 60:.0f} processor minutes. Metric: validation {task.metric}. Data: "
        f"{task.source}.",
        suite.history,
        f"Baselines without attention: {'; '.join(shown)}." if shown else "",
        _main_table(summary),
        _sweep_table(summary),
        _jacobian_table(summary),
        f"![curves]({summary.name}.png)",
    ]
    if summary.unfinished:
        text.append(f"Not run: {_titles(summary.unfinished)}.")
    return "\n\n".join(part for part in text if part)


def _main_table(summary: Summary) -> str:
    total, default = summary.suite.steps, summary.rows[0]
    same = {row.scheme: row.same for row in summary.rows if row.same is not None}
    words = verdicts(same, higher_is_better=summary.higher_is_better)
    rows = []
    for row in summary.rows:
        reached = sum(math.isfinite(step) for step in row.steps)
        partly = same[row.scheme].number < len(default.values) if row.scheme in same else False
        rows.append(
            {
                "initialization": SCHEMES[row.scheme].title,
                "seeds": str(len(row.curves)),
                "rate": f"{row.rate:g}",
                "final": _value(summary, row.final) + (f", {row.diverged} diverged" if row.diverged else ""),
                "minus default, best rates": _against_default(summary, row),
                f"minus default, both at {default.rate:g}": _judged(
                    summary, same.get(row.scheme), words.get(row.scheme, NONE)
                )
                + (f" ({same[row.scheme].number} seeds)" if partly else ""),
                "default's final metric at step (median)": _steps(row, total) + f", {reached} of {len(row.steps)}",
                "share of the default's steps": _ratio(row),
            }
        )
    return _table(rows)


def _sweep_table(summary: Summary) -> str:
    rates = sorted({rate for row in summary.rows for rate in row.tried})
    if len(rates) == 1:
        return ""
    rows = []
    for row in summary.rows:
        cells = {
            f"{rate:g}": _number(summary, row.tried[rate]) if math.isfinite(row.tried[rate]) else "diverged"
            for rate in rates
            if rate in row.tried
        }
        best = f"{row.rate:g}"
        rows.append({"initialization": SCHEMES[row.scheme].title} | cells | {best: f"**{cells[best]}**"})
    names = ("initialization", *(f"{rate:g}" for rate in rates))
    title = f"Mean over the first {summary.suite.sweep} seeds by learning rate, the best in bold:\n\n"
    return title + _table([dict.fromkeys(names, "") | row for row in rows])


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
            words += f"; not shown to differ from it: {_titles(row.scheme for row in equal)}"
        row = {"model and task": _name(summary), "take": words, "it minus the default": _against_default(summary, top)}
        paper = summary.row("conditioned")
        row["the paper's (conditioned, block)"] = _against_default(summary, paper) if paper else "not run"
        row["its share of the default's steps"] = (_ratio(paper) or "not reached with every seed") if paper else ""
        row["seeds, rates"] = f"{len(top.curves)}, {len(top.tried)}"
        rows.append(row)
    return (
        "**Which to take.** The initialization with the best mean among those that are better than the model's own, "
        "else among those perhaps better, and the model's own where there is none. Differences are in points of "
        "validation accuracy (more is better) or in nats of loss (less is better), paired by seed, with their "
        f"{LEVEL:.0%} interval; *perhaps* marks what does not hold after correction for the number of initializations "
        f"tried.\n\n{_table(rows)}"
    )


def _beside_the_paper(found: Sequence[Summary], tables: Mapping[str, Mapping[str, float]]) -> str:
    columns = ("model, task", "default", "mimetic", "conditioned", "default's final metric at")
    rows = [{"": "paper"} | dict(zip(columns, values, strict=True)) for values in PAPER_RESULTS]
    for summary in found:
        known = _best_table(summary, tables)
        row = {"": "here", "model, task": _name(summary)}
        for scheme in ("default", "mimetic", "conditioned"):
            entry = summary.row(scheme)
            row[scheme] = _value(summary, entry.final) if entry else ""
        entry = summary.row("conditioned")
        steps = f"{_steps(entry, summary.suite.steps)} of {summary.suite.steps} steps" if entry else ""
        row["no attention"] = _number(summary, known[1]) if known else ""
        rows.append(row | {"default's final metric at": steps})
    names = ("", "model, task", "no attention", *columns[1:])
    return (
        "**Beside the paper's own results** (epochs there, steps here; ± is the interval over seeds; *no attention* is "
        f"the best table of frequencies).\n\n{_table([dict.fromkeys(names, '') | row for row in rows])}"
    )


def _conclusions(found: Sequence[Summary], tables: Mapping[str, Mapping[str, float]]) -> str:
    lines = [
        "- The paper finds its initialization (conditioned, block) ahead of the default on every task. Here it is "
        f"{_verdicts(found)}."
    ]
    if mimetic := _verdicts(found, "mimetic"):
        lines.append(
            "- The paper finds it ahead of mimetic initialization on every task. Here, one comparison a suite, it "
            f"is {mimetic}."
        )
    if xavier := _verdicts(found, "xavier"):
        lines.append(f"- Against Xavier for W_Q, W_K and W_V, one comparison a suite, it is {xavier}.")
    more = (_sooner(found), _shown_contrasts(found), _followed(found), _ranks(found), _untaught(found, tables))
    lines += [f"- {line}" for line in more if line]
    return "**What agrees with the paper and what does not.**\n\n" + "\n".join(lines)


def _sooner(found: Sequence[Summary]) -> str:
    """In how much of the default's steps the paper's initialization has the default's final metric."""
    rows = [(summary, row) for summary in found if (row := summary.row("conditioned"))]
    parts = [f"{_ratio(row)} on {_name(summary)}" for summary, row in rows if row.ratio]
    missing = [_name(summary) for summary, row in rows if not row.ratio]
    if not rows:
        return ""
    if missing:
        parts.append(f"not with every seed on {', '.join(missing)}")
    return (
        "In the paper it has the default's final accuracy after 69 to 80 % of the epochs. Here, as a share of the "
        "steps after which the default of the same seed first has its final metric (geometric mean, interval over "
        f"seeds): {'; '.join(parts)}."
    )


def _ratio(row: Row) -> str:
    if row.ratio is None:
        return ""
    middle, low, high = (100 * math.exp(value) for value in (row.ratio.mean, row.ratio.low, row.ratio.high))
    return f"{middle:.0f} % ({low:.0f} to {high:.0f})"


def _verdicts(found: Sequence[Summary], reference: str = "default") -> str:
    """On which suites the paper's initialization is better than ``reference``, worse, and neither, by the rule."""
    names: dict[str, list[str]] = {word: [] for word in WORDS}
    for summary in found:
        if reference == "default":
            word = summary.verdicts.get("conditioned")
        else:
            difference = summary.difference("conditioned", reference)
            family = {"": difference} if difference else {}
            word = verdicts(family, higher_is_better=summary.higher_is_better).get("")
        if word is not None:
            names[word].append(_name(summary))
    return "; ".join(f"{_on(word)} {', '.join(on)}" for word, on in names.items() if on)


def _on(word: str) -> str:
    return "not shown to differ on" if word == NONE else f"{word} on"


def _followed(found: Sequence[Summary]) -> str:
    """Where kappa(J) of the paper's initialization is below the default's, at the start and through training."""
    lower: dict[str, list[str]] = {"at the start": [], "at the end": []}
    number = 0
    for summary in found:
        ours, default = summary.row("conditioned"), summary.row("default")
        if ours and default and ours.jacobian and default.jacobian:
            number += 1
            for names, index in zip(lower.values(), (0, -1), strict=True):
                first, second = (row.jacobian[index]["kappa"] or math.inf for row in (ours, default))
                if first < second:
                    names.append(_name(summary))
    if not number:
        return ""
    counts = "; ".join(f"{words} on {', '.join(names) or 'none'}" for words, names in lower.items())
    return (
        "The paper finds the average κ(J) lower through training. Here, on one layer, 16 tokens and one seed of each "
        f"of {number} suites, the exact κ(J) is below the default's {counts}."
    )


def _ranks(found: Sequence[Summary]) -> str:
    """Whether kappa(J) at the start orders the schemes as their results do."""
    from scipy.stats import spearmanr

    parts = []
    for summary in found:
        rows = [row for row in summary.rows if row.values and row.jacobian]
        rows = [row for row in rows if row.jacobian[0]["kappa"] and row.jacobian[0]["bound"]]
        if len(rows) >= 5:
            sign = 1 if summary.higher_is_better else -1
            results = [sign * row.final.mean for row in rows]
            kappa, bound = (spearmanr([-row.jacobian[0][name] for row in rows], results) for name in ("kappa", "bound"))
            parts.append(
                f"on {_name(summary)}, {len(rows)} initializations, {kappa.statistic:+.2f} (p = {kappa.pvalue:.2f}) "
                f"and {bound.statistic:+.2f} (p = {bound.pvalue:.2f})"
            )
    if not parts:
        return ""
    return (
        "Rank correlation between a small value at the start and a good result, for the exact κ(J) and for its bound: "
        f"{'; '.join(parts)}."
    )


def _untaught(found: Sequence[Summary], tables: Mapping[str, Mapping[str, float]]) -> str:
    """The suites whose default does not do better than the best table of frequencies with every seed."""
    parts = []
    for summary in found:
        known, sign = _best_table(summary, tables), 1 if summary.higher_is_better else -1
        final, values = summary.rows[0].final, summary.rows[0].values.values()
        if known and (above := sum(sign * value > sign * known[1] for value in values)) < len(values):
            parts.append(
                f"{_name(summary)} (better with {above} of {len(values)} seeds: {_value(summary, final)} "
                f"against {_number(summary, known[1])} from {known[0]})"
            )
    if not parts:
        return ""
    return (
        "Where the model's own initialization does not do better than a table of frequencies without attention, the "
        f"suite says little about attention: {'; '.join(parts)}."
    )


def _best_table(summary: Summary, tables: Mapping[str, Mapping[str, float]]) -> tuple[str, float] | None:
    """(what it looks at, its metric) of the best table of frequencies; None if none was measured."""
    known = tables.get(summary.suite.task, {})
    sign = 1 if summary.higher_is_better else -1
    return max(known.items(), key=lambda each: sign * each[1], default=None)


def _shown_contrasts(found: Iterable[Summary]) -> str:
    """The differences in one thing that are shown, in words."""
    parts = []
    for words, judged in _judged_contrasts(found).items():
        shown = [f"{word} on {_name(summary)}" for summary, _, word in judged if word in ("better", "worse")]
        if shown:
            parts.append(f"\n  - {words}: {', '.join(shown)}.")
    return f"One thing at a time, the first against the second, after correction:{''.join(parts)}" if parts else ""


def _judged_contrasts(found: Iterable[Summary]) -> dict[str, list[tuple[Summary, Interval, str]]]:
    """By contrast, every suite that has both schemes; the contrasts of one suite are a family."""
    out: dict[str, list[tuple[Summary, Interval, str]]] = {words: [] for _, _, words in CONTRASTS}
    for summary in found:
        if len(summary.rows) > 4:
            each = {words: summary.difference(first, second) for first, second, words in CONTRASTS}
            family = {words: difference for words, difference in each.items() if difference is not None}
            for words, word in verdicts(family, higher_is_better=summary.higher_is_better).items():
                out[words].append((summary, family[words], word))
    return out


def _contrasts(found: Sequence[Summary]) -> str:
    rows = []
    for words, judged in _judged_contrasts(found).items():
        if judged:
            cells = {_name(summary): _judged(summary, difference, word) for summary, difference, word in judged}
            rows.append({"one difference": words} | cells)
    if not rows:
        return ""
    names = dict.fromkeys(name for row in rows for name in row)
    text = "Paired by seed, each scheme at its own best rate; positive accuracy and negative loss favor the first."
    return text + "\n\n" + _table([{name: row.get(name, "not run") for name in names} for row in rows])


def _limits(found: Sequence[Summary]) -> str:
    steps = max(summary.suite.steps for summary in found)
    seeds = [len(row.curves) for summary in found for row in summary.rows]
    single = [_name(summary) for summary in found if all(len(row.tried) == 1 for row in summary.rows)]
    changed = [_name(summary) for summary in found if summary.suite.history]
    missing = [name for name in SUITES if name != "smoke" and name not in {summary.name for summary in found}]
    lines = [
        f"Small models, at most {steps} steps, {min(seeds)} to {max(seeds)} seeds, one optimizer (AdamW, warm-up, "
        "cosine), no dropout; nothing here is at the paper's scale or trained to convergence. The best rate is chosen "
        "on the same validation data as the result, for every scheme alike.",
        _chance(found),
    ]
    if changed:
        lines.append(f"Changed after first results were seen ([how]({PAGE})): {', '.join(changed)}.")
    if single:
        lines.append(f"One learning rate only: {', '.join(single)}.")
    for words, rows in (
        ("Best rate at an end of those tried", [(s, [r.scheme for r in s.rows if r.at_the_end]) for s in found]),
        ("Not run", [(s, s.unfinished) for s in found]),
    ):
        parts = [f"on {_name(s)} {_titles(schemes)}" for s, schemes in rows if schemes]
        if parts:
            lines.append(f"{words}: {'; '.join(parts)}.")
    if missing:
        lines.append(f"Defined but not run: {', '.join(missing)}.")
    return "**Where the evidence ends.**\n\n" + "\n".join(f"- {line}" for line in lines)


def _titles(schemes: Iterable[str]) -> str:
    return ", ".join(f"*{SCHEMES[scheme].title}*" for scheme in schemes)


def _name(summary: Summary) -> str:
    """Short, and of two suites on one model and task the steps too."""
    suite = summary.suite
    name = f"{MODELS[suite.model].title.split(',')[0]} on {TASKS[suite.task].short}"
    twins = [other for other in SUITES.values() if (other.task, other.model) == (suite.task, suite.model)]
    return f"{name} ({suite.steps} steps)" if len(twins) > 1 else name


def _number(summary: Summary, value: float) -> str:
    return f"{100 * value:.1f} %" if summary.higher_is_better else f"{value:.3f}"


def _value(summary: Summary, interval: Interval) -> str:
    if interval.number == 0:
        return "none"
    if summary.higher_is_better:
        return f"{100 * interval.mean:.1f} ± {100 * interval.half:.1f} %"
    return f"{interval.mean:.3f} ± {interval.half:.3f}"


def _against_default(summary: Summary, row: Row) -> str:
    return _judged(summary, row.best, summary.verdicts.get(row.scheme, NONE))


def _judged(summary: Summary, interval: Interval | None, word: str) -> str:
    if interval is None:
        return ""
    shown = "" if word == NONE else f", {word}"
    if summary.higher_is_better:
        return f"{100 * interval.mean:+.1f} ± {100 * interval.half:.1f}{shown}"
    return f"{interval.mean:+.3f} ± {interval.half:.3f}{shown}"


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
