"""The reward lab: every figure by hand, every refusal, and a page that writes no formula twice."""

import json
import math
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import require_browser
from hypothesis import given
from hypothesis import strategies as st

from geoguessr_rl import artifacts
from geoguessr_rl import reward_figures as figures
from geoguessr_rl.artifacts import UserError
from geoguessr_rl.config import CONFIGS, GrpoConfig, load
from geoguessr_rl.eval_metrics import make_prediction
from geoguessr_rl.phases import reward_lab
from geoguessr_rl.prompt import format_completion
from geoguessr_rl.records import Completion, FinishReason, Prediction
from geoguessr_rl.reward import (
    DEFAULT_SHAPE,
    SCORE_VERSION,
    RewardShape,
    components,
    distance_reward,
)
from geoguessr_rl.reward_figures import Answers, Curve, Figures

TRUTH = (0.0, 20.0, "CD")


def answer(km: float, *, right: bool = True) -> str:
    """An answer so many km east of the truth, on the equator."""
    east = math.degrees(km / 6371.0088)
    country = "Democratic Republic of the Congo" if right else "Gabon"
    return format_completion(country, 0.0, 20.0 + east, style="direct")


SILENT = "I cannot tell."


def rows_of(
    groups: Sequence[Sequence[str]], finish_reason: FinishReason = "stop"
) -> list[Prediction]:
    return [
        make_prediction(f"{i}", k, *TRUTH, Completion(text, 30, finish_reason))
        for i, group in enumerate(groups)
        for k, text in enumerate(group)
    ]


def write(folder: Path, rows: Sequence[Prediction], **identity: Any) -> Path:
    stands = {"split": "train_pool", "score_version": SCORE_VERSION, **identity}
    artifacts.write_rows(folder / artifacts.PREDICTIONS, rows)
    artifacts.write_json(folder / artifacts.IDENTITY, stands)
    return folder


GROUPS = [
    [answer(100), answer(100), answer(900), answer(3000, right=False)],
    [answer(0)] * 4,
    [answer(8000, right=False), answer(9000, right=False)] * 2,
    [SILENT, SILENT, answer(50), SILENT],
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "filter", rows_of(GROUPS))


def config(*overrides: str) -> GrpoConfig:
    return load(GrpoConfig, CONFIGS / "grpo.yaml", overrides=overrides)


def lab(folder: Path, *overrides: str) -> dict[str, Any]:
    out = folder.parent / "lab"
    reward_lab.run(folder, config(*overrides), out)
    found: dict[str, Any] = json.loads((out / reward_lab.RESULTS).read_text())
    return found


def page_of(folder: Path) -> str:
    return (folder.parent / "lab" / reward_lab.PAGE).read_text(encoding="utf-8")


# The figures.


@pytest.mark.parametrize("curve", figures.CURVES, ids=lambda curve: curve.name)
@pytest.mark.parametrize("weights", figures.WEIGHTS.values(), ids=list(figures.WEIGHTS))
def test_rewards_are_those_of_the_one_scoring_path(
    folder: Path, curve: Curve, weights: figures.Weights
) -> None:
    answers = reward_lab.load(folder)
    found = figures.totals(answers, figures.distance_rewards(answers, curve), weights)
    names = ("format_weight", "country_weight", "dist_weight")
    shape = RewardShape(
        curve.shape.name,
        curve.shape.scales_km,
        curve.shape.scale_weights,
        curve.shape.knots,
        **dict(zip(names, weights, strict=True)),
    )
    for row, group in zip(found, GROUPS, strict=True):
        for value, text in zip(row, group, strict=True):
            assert value == pytest.approx(components(text, *TRUTH, shape, curve.progress).total)


def test_the_zero_spread_share_of_groups_as_large_as_the_cache_is_what_is_seen() -> None:
    rewards = np.array([[0.5, 0.5, 0.5, 0.5], [0.5, 0.5, 0.5, 0.6], [0.1, 0.2, 0.3, 0.4]])
    assert figures.zero_spread(rewards, 4).tolist() == [1, 0, 0]


def test_the_expected_zero_spread_of_smaller_and_larger_groups_by_hand() -> None:
    rewards = np.array([[0.5, 0.5, 0.5, 0.6], [0.1, 0.1, 0.2, 0.2], [0.1, 0.2, 0.3, 0.4]])
    # Pairs of 4, without putting back: 3 of 6 are equal; 2 of 6; none.
    assert figures.zero_spread(rewards, 2) == pytest.approx([3 / 6, 2 / 6, 0])
    # Eight with putting back: 0.75^8 + 0.25^8; 2 x 0.5^8; 4 x 0.25^8.
    by_hand = [0.75**8 + 0.25**8, 2 * 0.5**8, 4 * 0.25**8]
    assert figures.zero_spread(rewards, 8) == pytest.approx(by_hand)


@given(st.lists(st.sampled_from([0.0, 0.3, 1.0]), min_size=4, max_size=4), st.integers(2, 12))
def test_a_larger_group_is_never_likelier_to_be_without_spread(
    group: list[float], size: int
) -> None:
    # Within one way of drawing: from 4 to 5 the way changes, and the share may rise.
    if size != 4:
        rewards = np.array([group])
        smaller, larger = (figures.zero_spread(rewards, n)[0] for n in (size, size + 1))
        assert 0 <= larger <= smaller + 1e-12 <= 1 + 1e-9


def test_differences_below_what_trl_sees_are_none() -> None:
    assert figures.zero_spread(np.array([[0.5, 0.5 + 1e-10]]), 2).tolist() == [1]
    assert figures.zero_spread(np.array([[0.5, 0.5 + 1e-6]]), 2).tolist() == [0]


def test_the_spread_is_trls_deviation() -> None:
    torch = pytest.importorskip("torch")
    from trl.trainer.utils import nanstd

    rewards = np.array([[0.0, 1.0], [0.2, 0.4]])
    # Two values a apart deviate by a / sqrt(2) as a sample.
    assert figures.spreads(rewards) == pytest.approx([1 / math.sqrt(2), 0.2 / math.sqrt(2)])
    assert figures.spreads(rewards) == pytest.approx(nanstd(torch.tensor(rewards), dim=1).tolist())


def test_the_best_answer_changes_when_no_best_one_is_among_the_best() -> None:
    reference = np.array([[0.9, 0.1, 0.5], [0.9, 0.9, 0.1], [0.2, 0.2, 0.2]])
    rewards = np.array([[0.1, 0.9, 0.5], [0.1, 0.9, 0.1], [0.1, 0.2, 0.3]])
    # The first group's best moves; the second's is one of two; in the third all were best.
    assert figures.best_changes(rewards, reference).tolist() == [1, 0, 0]


def test_a_country_weight_moves_the_best_answer_by_hand() -> None:
    # The right country 900 km off earns 0.1 + 0.3 + 0.6 x 0.287 = 0.572 with the default, the wrong
    # one 50 km off 0.1 + 0.6 x 0.893 = 0.636; with 0.4 / 0.5: 0.643 against 0.546.
    answers = figures.answers_of({"0": rows_of([[answer(900), answer(50, right=False)]])})
    found = figures.measure(answers, figures.CURVES[:1], figures.WEIGHTS, 2)
    assert [one["two_scale"].changed.tolist() for one in found.values()] == [[0], [1], [0]]


def test_where_a_curve_is_flat_by_hand() -> None:
    geoscore = Curve("geoscore", RewardShape(name="geoscore"))
    # With x = exp(-d / 2985.4) half as near gains x - x^2, under 0.02 where x > 0.97958 or
    # x < 0.02042: up to 61.6 km and from 11,617 km.
    assert figures.is_flat(geoscore, 61) and not figures.is_flat(geoscore, 62)
    assert figures.is_flat(geoscore, 11_618) and not figures.is_flat(geoscore, 11_616)
    grid = [10.0, 50.0, 70.0, 5000.0, 12_000.0, 20_000.0]
    assert figures.flat_ranges(geoscore, grid) == [(10, 50), (12_000, 20_000)]
    ranges = [(1.0, 50.0), (70.0, 90.0), (12_000.0, 20_000.0)]
    assert reward_lab.ranges_text(ranges) == "up to 50 km, 70 to 90 km, from 12,000 km"
    assert reward_lab.ranges_text([(1.0, 20_000.0)]) == "everywhere"
    assert reward_lab.ranges_text([]) == "nowhere"


def test_the_histogram_holds_every_answer() -> None:
    found = figures.histogram(np.array([0.0, 0.5, 5.0, 50.0, 20_015.0]), [1, 10, 100, 20_000])
    assert found == [3, 1, 1]


def constant(zero: float, spread: Sequence[float]) -> Figures:
    n = len(spread)
    fixed = np.full(n, zero)
    return Figures(zero=fixed, zero_seen=fixed, spread=np.array(spread), changed=np.zeros(n))


WIDE, NARROW = [0.3] * 20, [0.2] * 20
NOISE = [0.2 + 0.1 * (-1) ** i for i in range(20)]


@pytest.mark.parametrize(
    ("found", "best", "words"),
    [
        ([constant(0.2, WIDE), constant(0.1, NARROW)], "b", "lowest zero-spread share, 0.100"),
        ([constant(0.1, NARROW), constant(0.1, WIDE)], "b", "largest mean spread, 0.300 against"),
        ([constant(0.1, NARROW), constant(0.2, WIDE)], "a", "nothing that another"),
        ([constant(0.1, NARROW), constant(0.1, NARROW)], "a", "nothing that another"),
        ([constant(0.1, NARROW), constant(0.1, NOISE)], "a", "nothing that another"),
    ],
    ids=["fewer zeros", "more spread", "zeros come first", "equal", "chance"],
)
def test_the_recommendation_follows_its_rule(found: list[Figures], best: str, words: str) -> None:
    curve, why = figures.recommend(dict(zip("ab", found, strict=True)), ["a", "b"])
    assert curve == best
    assert words in why


def test_a_configs_own_shape_and_weights_take_part() -> None:
    curves, weights = figures.with_own(DEFAULT_SHAPE)
    assert (tuple(curves), weights) == (figures.CURVES, figures.WEIGHTS)
    own = RewardShape(scales_km=(3000, 100), format_weight=0.2, country_weight=0.2)
    curves, weights = figures.with_own(own)
    assert curves[-1].name == "your two_scale"
    assert curves[-1].at(100) == distance_reward(100, own)
    assert weights["your own"] == (0.2, 0.2, 0.6)
    curves, _ = figures.with_own(RewardShape(name="curriculum", scales_km=(900.0, 90.0)))
    assert [curve.progress for curve in curves[-3:]] == [0, 0.5, 1]


# The folder.


def test_the_figures_of_a_small_folder_by_hand(folder: Path) -> None:
    found = lab(folder)
    assert (found["photos"], found["answers_a_photo"], found["group"]) == (4, 4, 8)
    assert found["unanswered_share"] == pytest.approx(3 / 16)
    default = found["figures"]["default"]["two_scale"]
    assert default["zero_seen"] == 1 / 4  # the group of perfect answers
    # Group by group: 0.5^8 + 2 x 0.25^8; 1; 2 x 0.5^8; 0.75^8 + 0.25^8.
    by_hand = (0.5**8 + 2 * 0.25**8) + 1 + 2 * 0.5**8 + (0.75**8 + 0.25**8)
    assert default["zero"] == pytest.approx(by_hand / 4)
    # At the end of a curriculum, exp(-8000 / 25) and exp(-9000 / 25) are one reward.
    assert found["figures"]["default"]["curriculum, end"]["zero_seen"] == 2 / 4
    assert sum(found["histogram"]["answers"]) == 13
    # The base answers 0 km 4 times, 50 once, 100 twice, 900, 3000, 8000 and 9000 twice each: flat
    # for geoscore are 0 and 50 km.
    assert found["curves"]["geoscore"]["flat_share"] == pytest.approx(5 / 13)


def test_a_real_filters_folder_is_read(
    tmp_path: Path, make_split: Callable[..., Path], script: Callable[..., Any]
) -> None:
    photos = [(f"p{i}", *TRUTH) for i in range(3)]
    make_split(tmp_path / "data", photos, name="train_pool", role="train")
    texts = {f"p{i}": [answer(10), answer(10), answer(500), SILENT] for i in range(3)}
    (tmp_path / "answers.json").write_text(json.dumps(texts))
    filtered = script(
        *("filter_learnable.py", "--backend", "scripted", "--data_dir", tmp_path / "data"),
        *("--output_dir", tmp_path / "filter", "--set", "min_rows=0"),
        *("--set", f"generation.script={tmp_path / 'answers.json'}"),
    )
    assert filtered.code == 0, filtered.err
    ended = script("reward_lab.py", tmp_path / "filter", "--output_dir", tmp_path / "lab")
    assert ended.code == 0, ended.err
    assert "3 photos, 4 answers each; 25.0 % of them hold no place" in ended.out
    assert "recommended with default weights:" in ended.out
    assert "an upper end" in ended.out
    for curve in figures.CURVES:
        assert ended.out.count(f"\n{curve.name}  ") == 1 + len(figures.WEIGHTS)
    assert {path.name for path in (tmp_path / "lab").iterdir()} == {
        reward_lab.PAGE,
        reward_lab.RESULTS,
    }


def test_answers_without_any_place_still_give_a_page(tmp_path: Path) -> None:
    found = lab(write(tmp_path / "filter", rows_of([[SILENT] * 2] * 3)))
    assert found["median_km"] is None
    assert found["figures"]["default"]["two_scale"]["zero"] == 1
    assert found["recommended"]["curve"] == "two_scale"


def test_groups_no_larger_than_the_cache_are_drawn_without_repetition(folder: Path) -> None:
    batch = ("trainer.num_generations=2",)
    lines = reward_lab.run(folder, config(*batch), folder.parent / "lab")
    assert any(line.endswith("answers: the expected share.") for line in lines)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda at: at, "run.json does not exist; give the folder"),
        (lambda at: write(at, [], split="train_pool"), "is incomplete: it has no row"),
        (lambda at: write(at, rows_of(GROUPS), split="eval_osv"), "holds answers to eval_osv"),
        (lambda at: write(at, rows_of(GROUPS), score_version="0"), "was scored by version '0'"),
        (lambda at: write(at, rows_of(GROUPS, "error")), "16 of its 16 rows are transport errors"),
        (lambda at: write(at, rows_of([[SILENT]] * 3)), "one answer a photo"),
        (lambda at: write(at, rows_of(GROUPS)[:-1]), "3 answers for some photos and 4 for others"),
    ],
    ids=["empty", "no rows", "wrong split", "old scores", "errors", "one sample", "cut short"],
)
def test_an_unfit_folder_is_refused_in_words(
    tmp_path: Path, script: Callable[..., Any], make: Callable[[Path], Path], message: str
) -> None:
    at = tmp_path / "filter"
    at.mkdir()
    ended = script("reward_lab.py", make(at), "--output_dir", tmp_path / "lab")
    assert ended.code == 2
    assert message in ended.err and ended.err.count("\n") == 1
    assert not (tmp_path / "lab").exists()


def test_rewards_that_the_distances_do_not_give_are_refused(folder: Path) -> None:
    path = folder / artifacts.PREDICTIONS
    text = path.read_text()
    path.write_text(re.sub(r'"d_km": ?900[.\d]*', '"d_km": 90.0', text, count=1))
    assert path.read_text() != text
    with pytest.raises(UserError, match="holds rewards that its own distances do not give"):
        reward_lab.load(folder)


def test_a_group_size_that_is_none_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match="num_generations 1 must be"):
        lab(folder, "trainer.num_generations=1")


# The page.


def test_the_page_holds_every_shape_and_asks_the_network_for_nothing(folder: Path) -> None:
    lab(folder)
    page = page_of(folder)
    for name in [*(curve.name for curve in figures.CURVES), *figures.WEIGHTS]:
        assert name in page
    assert page.count("<polyline") == len(figures.CURVES)
    assert "default-src 'none'" in page
    assert not re.search(r"(src|href|action)=|url\(|@import|https?:", page)


def test_the_sliders_values_are_the_distance_reward(folder: Path) -> None:
    lab(folder)
    (text,) = re.findall(
        r'<script type="application/json" id="values">(.*?)</script>', page_of(folder)
    )
    values = json.loads(text)
    for curve, rewards in zip(figures.CURVES, values["rewards"], strict=True):
        for km, reward in zip(values["km"], rewards, strict=True):
            expected = distance_reward(float(km.replace(",", "")), curve.shape, curve.progress)
            assert reward == pytest.approx(expected, abs=5.1e-5)
    assert values["km"][0] == "1" and values["km"][-1] == "20,000"


def test_the_page_computes_no_reward() -> None:
    template = Path(reward_lab.__file__).with_name("reward_lab.html.jinja").read_text()
    assert "Math." not in template


def test_moving_the_slider_shows_each_shapes_reward(folder: Path) -> None:
    lab(folder)
    moved = (
        """<script>slider.value = 120; slider.dispatchEvent(new Event("input"));</script></body>"""
    )
    at = folder.parent / "moved.html"
    at.write_text(page_of(folder).replace("</body>", moved), encoding="utf-8")
    chromium = require_browser()
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", at.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert 'aria-valuetext="1,000 km"' in dom
    shown = [float(value) for value in re.findall(r"<b>(\d\.\d{3})</b></li>", dom)]
    expected = [curve.at(1000) for curve in figures.CURVES]
    assert shown == pytest.approx(expected, abs=6e-4)


def test_a_configs_own_shape_stands_on_the_page(folder: Path) -> None:
    found = lab(
        folder,
        'reward.parameters={"scales_km": [3000, 100], "country_weight": 0.2, "format_weight": 0.2}',
    )
    assert "your two_scale" in page_of(folder)
    assert found["recommended"]["weights"] == "your own"
    assert found["figures"]["your own"].keys() == found["curves"].keys()


def test_answers_are_a_table_of_photos_and_samples() -> None:
    answers = figures.answers_of({"0": rows_of([[answer(100), SILENT]])})
    assert isinstance(answers, Answers)
    assert answers.format.tolist() == [[1, 0]]
    assert answers.distances == pytest.approx([100])
