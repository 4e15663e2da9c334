"""Reward lab: the filter's cached completions -> what each reward shape would teach from them.

Nothing is generated and nothing is parsed: the rows' own parts recombine to every shape and every
set of weights (`reward_figures.py`). The page holds the curves over the base model's distances and
a slider; its values come from `reward.distance_reward`, so that no formula is written twice.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from geoguessr_rl import artifacts
from geoguessr_rl import reward_figures as figures
from geoguessr_rl.artifacts import UserError
from geoguessr_rl.charts import chart
from geoguessr_rl.config import GrpoConfig
from geoguessr_rl.eval_metrics import by_photo
from geoguessr_rl.records import Prediction
from geoguessr_rl.reward import DEFAULT_SHAPE, SCORE_VERSION
from geoguessr_rl.reward_figures import Answers, Curve, Figures
from geoguessr_rl.tables import columns, number, templates

PAGE, RESULTS = "reward_lab.html", "reward_lab.json"
GENERATIONS = 8  # TRL's own default of num_generations
# The slider's distances in km, 40 to a factor of ten, as exact as they are shown.
GRID = [float(f"{km:.3g}") for km in np.logspace(0, math.log10(figures.FARTHEST_KM), 173)]
EDGES = GRID[::4]  # of the histogram's bars
X_TICKS = {math.log10(km): f"{km:,}" for km in (1, 10, 100, 1000, 20_000)}
RULE = (
    "The lowest expected zero-spread share, then the largest mean spread; a difference counts "
    "where its 95 % interval over photos leaves out 0, and in doubt two_scale stays. A curriculum "
    "is shown at three points of the run and not recommended: no single one is the shape. Weights "
    "are not recommended either: they say what a good answer is, which no spread can decide."
)


def load(folder: Path) -> Answers:
    """Reads the answers that the filter cached.

    Raises:
        UserError: The folder holds none, unfinished or wrongly scored ones, those of photos that
            must not decide about training, or one answer a photo.
    """
    remedy = "give the folder that scripts/filter_learnable.py has finished, like outputs/filter"
    identity = artifacts.read_json(folder / artifacts.IDENTITY, remedy=remedy)
    if (split := identity.get("split")) != "train_pool":
        raise UserError(
            f"{folder} holds answers to {split}, and a reward is chosen on train photos only; "
            f"{remedy}"
        )
    if (version := identity.get("score_version")) != SCORE_VERSION:
        raise UserError(
            f"{folder} was scored by version {version!r} and this code has {SCORE_VERSION!r}; "
            "run the filter again into another folder"
        )
    rows = artifacts.read_rows(folder / artifacts.PREDICTIONS, Prediction)
    errors = sum(row.outcome == "error" for row in rows)
    if errors or not rows:
        what = f"{errors} of its {len(rows)} rows are transport errors" if rows else "it has no row"
        raise UserError(f"{folder} is incomplete: {what}; run the filter again, which goes on")
    groups = by_photo(rows)
    sizes = {len(group) for group in groups.values()}
    if sizes == {1}:
        raise UserError(
            f"{folder} holds one answer a photo, which has no spread; filter with completions: 4"
        )
    if len(sizes) > 1:
        raise UserError(
            f"{folder} holds {min(sizes)} answers for some photos and {max(sizes)} for others; "
            "run the filter again, which goes on"
        )
    answers = figures.answers_of(groups)
    stored = np.array([[row.total for row in group] for group in groups.values()])
    dist = figures.distance_rewards(answers, Curve("default", DEFAULT_SHAPE))
    if not np.allclose(
        figures.totals(answers, dist, figures.weights_of(DEFAULT_SHAPE)), stored, atol=1e-9
    ):
        raise UserError(
            f"{folder / artifacts.PREDICTIONS} holds rewards that its own distances do not give; "
            "run the filter again into another folder"
        )
    return answers


def run(folder: Path, config: GrpoConfig, output_dir: Path) -> list[str]:
    """Compares the shapes, writes `reward_lab.json` and `reward_lab.html`, and returns the tables.

    Args:
        folder: The filter's output folder.
        config: The training config; its shape, weights and group size take part.
        output_dir: Where the two files go.

    Raises:
        UserError: See `load`.
    """
    answers = load(folder)
    group = config.trainer.get("num_generations", GENERATIONS)
    if not isinstance(group, int) or group < 2:
        raise UserError(f"trainer.num_generations {group!r} must be a whole number of 2 or more")
    chosen = config.reward.build()
    curves, weights = figures.with_own(chosen)
    found = figures.measure(answers, curves, weights, group)
    own = next(name for name, one in weights.items() if one == figures.weights_of(chosen))
    candidates = [curve.name for curve in curves if curve.shape.name != "curriculum"]
    best, why = figures.recommend(found[own], candidates)
    result = {
        "photos": len(answers.d_km),
        "answers_a_photo": answers.d_km.shape[1],
        "unanswered_share": float(np.isnan(answers.d_km).mean()),
        "median_km": float(np.median(answers.distances)) if answers.distances.size else None,
        "group": group,
        "weights": {name: list(one) for name, one in weights.items()},
        "histogram": {
            "edges_km": EDGES,
            "answers": figures.histogram(answers.distances, EDGES),
        },
        "flat_gain": figures.FLAT_GAIN,
        "curves": {curve.name: curve_figures(curve, answers) for curve in curves},
        "figures": figures.plain(found),
        "recommended": {"weights": own, "curve": best, "why": why, "rule": RULE},
    }
    artifacts.write_json(output_dir / RESULTS, result)
    artifacts.write_text(output_dir / PAGE, page(result, found) + "\n")
    return [*table_lines(result, found), f"page: {output_dir / PAGE}"]


def curve_figures(curve: Curve, answers: Answers) -> dict[str, Any]:
    """Returns where a curve is flat, the share of the answers that lie there, and its values."""
    flat = [figures.is_flat(curve, d_km) for d_km in answers.distances]
    return {
        "flat_km": figures.flat_ranges(curve, GRID),
        "flat_share": float(np.mean(flat)) if flat else 0.0,
        "rewards": [round(curve.at(d_km), 4) for d_km in GRID],
    }


def ranges_text(ranges: Sequence[tuple[float, float]]) -> str:
    """Writes the distances over which a curve is flat in words."""
    words = []
    for low, high in ranges:
        ends = [f"{km:,.0f}" for km in (low, high)]
        if high >= GRID[-1]:
            words.append("everywhere" if low <= GRID[0] else f"from {ends[0]} km")
        else:
            words.append(f"up to {ends[1]} km" if low <= GRID[0] else f"{ends[0]} to {ends[1]} km")
    return ", ".join(words) or "nowhere"


def rows_of(found: Mapping[str, Figures]) -> list[tuple[str, ...]]:
    """Returns the rows of one weight set's table: curve, expected and seen zero spread, and so on.

    Shares are in percent.
    """
    rows = []
    for name, one in found.items():
        means = one.means()
        shares = [number(means[key], "share") for key in ("zero", "zero_seen", "changed")]
        rows.append((name, *shares[:2], f"{means['spread']:.3f}", shares[2]))
    return rows


def table_lines(result: Mapping[str, Any], found: Mapping[str, Mapping[str, Figures]]) -> list[str]:
    """Returns the terminal's tables."""
    recommended, k = result["recommended"], result["answers_a_photo"]
    head = (f"zero of {result['group']}", f"zero of {k}", "spread", "best changes")
    flat = [
        (name, ranges_text(one["flat_km"]), number(one["flat_share"], "share"))
        for name, one in result["curves"].items()
    ]
    lines = [
        summary(result),
        "",
        f"Flat: half as near gains under {figures.FLAT_GAIN:g} of the distance reward",
        *columns([("shape", "over", "% of answers"), *flat]),
    ]
    for name, weights in result["weights"].items():
        title = f"{name}: {' / '.join(f'{one:g}' for one in weights)}"
        lines += ["", *columns([(title, *head), *rows_of(found[name])])]
    return [
        *lines,
        "",
        "zero: % of groups whose answers all earn the same; spread: mean sample deviation of a "
        "group, by which TRL divides with scale_rewards: group; best changes: % of groups whose "
        "best answer is another than with two_scale and the default weights",
        expectation(result),
        f"recommended with {recommended['weights']} weights: {recommended['curve']}; it has "
        f"{recommended['why']}",
        f"rule: {RULE}",
    ]


def summary(result: Mapping[str, Any]) -> str:
    """Returns what was read, in a sentence."""
    return (
        f"{result['photos']:,} photos, {result['answers_a_photo']} answers each; "
        f"{number(result['unanswered_share'], 'share')} % of them hold no place; the others lie "
        f"{number(result['median_km'], 'km')} km off in the median"
    )


def expectation(result: Mapping[str, Any]) -> str:
    """Returns how the zero-spread share of training's groups was found, in a sentence."""
    group, k = result["group"], result["answers_a_photo"]
    if group <= k:
        return f"Groups of {group} are drawn from each photo's {k} answers: the expected share."
    return (
        f"Groups of {group} are drawn from each photo's {k} answers with repetition; where all {k} "
        f"earn the same, all {group} do, though another answer might have differed: an upper end."
    )


def page(result: Mapping[str, Any], found: Mapping[str, Mapping[str, Figures]]) -> str:
    """Returns the self-contained page."""
    x = [math.log10(km) for km in GRID]
    series = {
        name: list(zip(x, one["rewards"], strict=True)) for name, one in result["curves"].items()
    }
    counts, last = result["histogram"]["answers"], math.log10(EDGES[-1])
    edges = [100 * math.log10(km) / last for km in EDGES]
    start = int(np.argmin(np.abs(np.array(GRID) - (result["median_km"] or 1000.0))))
    environment = templates()
    environment.filters |= {"number": number}
    return environment.get_template("phases/reward_lab.html.jinja").render(
        result=result,
        summary=summary(result),
        expectation=expectation(result),
        chart=chart("Distance reward", ("km off", "reward, 0 to 1"), series, x_ticks=X_TICKS),
        bars=[
            (left, right - left, 100 * count / max(*counts, 1))
            for left, right, count in zip(edges[:-1], edges[1:], counts, strict=True)
        ],
        flat={name: ranges_text(one["flat_km"]) for name, one in result["curves"].items()},
        tables={name: rows_of(curves) for name, curves in found.items()},
        start=start,
        values={
            "km": [f"{km:,.10g}" for km in GRID],
            "rewards": [one["rewards"] for one in result["curves"].values()],
        },
    )
