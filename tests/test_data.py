"""Data: draws that are fair and repeatable, train apart from evaluation, splits that hold."""

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from conftest import make_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from geoguessr_rl import artifacts, data
from geoguessr_rl.artifacts import UserError
from geoguessr_rl.config import TrainPool
from geoguessr_rl.records import PHOTO_SCHEMA
from geoguessr_rl.reward import haversine_km


def candidates(counts: dict[str, int]) -> pl.DataFrame:
    rows = [
        {"id": f"{code}{n}", "country_iso2": code}
        for code, count in counts.items()
        for n in range(count)
    ]
    random.Random(0).shuffle(rows)
    return pl.DataFrame(rows, schema={"id": pl.String, "country_iso2": pl.String})


def country_counts(ids: list[str]) -> Counter[str]:
    return Counter(identifier[:2] for identifier in ids)


def test_rounds_take_one_photo_of_every_country_a_round() -> None:
    rows = candidates({"FR": 50, "DE": 3, "NA": 1, "BR": 20})
    drawn, spares = data.draw_rounds(rows, size=14, rounds=10, seed=1)
    assert country_counts(drawn) == {"FR": 5, "BR": 5, "DE": 3, "NA": 1}
    assert len(set(drawn)) == 14
    assert {code: len(ids) for code, ids in spares.items()} == {
        "BR": 15,
        "DE": 0,
        "FR": 45,
        "NA": 0,
    }


def test_within_a_round_no_country_is_favoured() -> None:
    rows = candidates({"AA": 9, "BB": 9, "CC": 9})
    drawn, _ = data.draw_rounds(rows, size=7, rounds=10, seed=3)
    assert sorted(country_counts(drawn).values()) == [2, 2, 3]
    firsts = {
        next(iter(country_counts(data.draw_rounds(rows, size=1, rounds=1, seed=seed)[0])))
        for seed in range(20)
    }
    assert firsts == {"AA", "BB", "CC"}


def test_what_is_missing_after_the_last_round_is_drawn_at_random() -> None:
    rows = candidates({"FR": 500, "DE": 500, "NA": 1})
    drawn, _ = data.draw_rounds(rows, size=105, rounds=2, seed=1)
    counts = country_counts(drawn)
    assert len(set(drawn)) == 105 and counts["NA"] == 1
    assert counts["FR"] != counts["DE"]
    assert 30 < counts["FR"] < 75
    everything, spares = data.draw_rounds(rows, size=5000, rounds=2, seed=1)
    assert sorted(everything) == sorted(rows["id"]) and not any(spares.values())


def test_a_prefix_of_the_draw_is_a_fair_sample() -> None:
    """The rounds come first in the draw and not in the order, where a prefix would be of them."""
    rows = candidates({"FR": 900, "DE": 60})
    drawn, _ = data.draw_rounds(rows, size=600, rounds=10, seed=5)
    assert country_counts(drawn)["DE"] >= 10
    assert country_counts(drawn[:60])["DE"] < 10


@settings(max_examples=40, deadline=None)
@given(
    counts=st.dictionaries(
        st.sampled_from(["FR", "DE", "NA", "BR", "XK"]), st.integers(1, 8), min_size=1
    ),
    size=st.integers(1, 30),
    rounds=st.integers(1, 6),
    seed=st.integers(0, 5),
)
def test_draws_are_repeatable_disjoint_and_independent_of_the_row_order(
    counts: dict[str, int], size: int, rounds: int, seed: int
) -> None:
    rows = candidates(counts)
    drawn, spares = data.draw_rounds(rows, size=size, rounds=rounds, seed=seed)
    assert len(set(drawn)) == len(drawn) == min(size, rows.height)
    kept = [identifier for ids in spares.values() for identifier in ids]
    assert sorted([*drawn, *kept]) == sorted(rows["id"])
    assert data.draw_rounds(
        rows.sample(fraction=1, shuffle=True, seed=9), size=size, rounds=rounds, seed=seed
    ) == (drawn, spares)
    capped, rest = data.draw_train(rows, TrainPool(cap=rounds), seed=seed)
    assert country_counts(capped) == {code: min(n, rounds) for code, n in counts.items()}
    assert sorted([*capped, *(one for ids in rest.values() for one in ids)]) == sorted(rows["id"])
    assert data.draw_train(rows.reverse(), TrainPool(cap=rounds), seed=seed) == (capped, rest)


def test_another_seed_draws_other_photos() -> None:
    rows = candidates({"FR": 50, "DE": 50})
    draws = [data.draw_rounds(rows, size=20, rounds=10, seed=seed)[0] for seed in range(3)]
    assert len({frozenset(drawn) for drawn in draws}) == 3
    assert (
        data.draw_train(rows, TrainPool(cap=5), seed=1)[0]
        != data.draw_train(rows, TrainPool(cap=5), seed=2)[0]
    )


def test_one_more_country_leaves_the_others_order_alone() -> None:
    few, _ = data.draw_train(candidates({"FR": 50, "DE": 50}), TrainPool(cap=5), seed=1)
    more, _ = data.draw_train(candidates({"FR": 50, "DE": 50, "BR": 50}), TrainPool(cap=5), seed=1)
    assert set(few) < set(more)


def places(*rows: tuple[str, float, float, str | None]) -> pl.DataFrame:
    return pl.DataFrame(
        rows,
        schema={
            "id": pl.String,
            "latitude": pl.Float64,
            "longitude": pl.Float64,
            "sequence": pl.String,
        },
        orient="row",
    )


def test_train_rows_of_an_evaluation_photo_sequence_or_place_go_and_are_counted() -> None:
    evaluation = places(("e1", 48.0, 2.0, "walk"), ("e2", -10.0, 20.0, None), ("e3", 5, 5, ""))
    train = places(
        ("e1", 0.0, 50.0, None),  # the same photo
        ("t1", 1.0, 50.0, "walk"),  # the same sequence
        ("t2", 48.0027, 2.0, "other"),  # 300 m away
        ("t3", 2.0, 50.0, None),  # null and empty sequences match nothing
        ("t4", 3.0, 50.0, ""),
        ("t5", 4.0, 50.0, " "),
        ("t6", 48.0, 2.1, "other"),  # 7 km away
    )
    kept, counts = data.keep_apart(train, evaluation, min_km=1.0)
    assert kept["id"].to_list() == ["t3", "t4", "t5", "t6"]
    assert counts == {"same_photo": 1, "same_sequence": 1, "within_min_km": 1}
    assert kept.columns == train.columns


def test_without_evaluation_or_train_rows_nothing_goes() -> None:
    rows, none = places(("t1", 1.0, 2.0, "s")), places()
    assert data.keep_apart(rows, none, min_km=1)[0].height == 1
    assert data.keep_apart(none, rows, min_km=1)[0].height == 0


@pytest.mark.parametrize(
    ("evaluation", "near", "far"),
    [
        pytest.param((0, 179.997), (0, -179.997), (0, -179.98), id="antimeridian"),
        pytest.param((-17, 180), (-17, -180), (-17, -179.98), id="the antimeridian itself"),
        pytest.param((89.998, 0), (89.998, 180), (89.98, 180), id="north pole"),
        pytest.param((-90, 0), (-90, 77), (-89.98, 77), id="south pole"),
        pytest.param((70, 25), (70, 25.02), (70, 25.04), id="a short degree of longitude"),
        pytest.param((0, 0.5), (0.00899, 0.5), (0.00900, 0.5), id="just under and over 1 km"),
    ],
)
def test_one_kilometre_is_measured_on_the_globe(
    evaluation: tuple[float, float], near: tuple[float, float], far: tuple[float, float]
) -> None:
    assert haversine_km(*evaluation, *near) < 1 < haversine_km(*evaluation, *far)
    train = places(("near", *near, None), ("far", *far, None))
    kept, counts = data.keep_apart(train, places(("e", *evaluation, None)), min_km=1.0)
    assert kept["id"].to_list() == ["far"] and counts["within_min_km"] == 1


@settings(max_examples=60, deadline=None)
@given(
    st.floats(-90, 90),
    st.floats(-180, 180),
    st.floats(-0.02, 0.02),
    st.floats(-0.02, 0.02),
    st.sampled_from([0.5, 1.0, 300.0]),
)
def test_the_tree_agrees_with_the_distance_of_the_reward(
    lat: float, lon: float, north: float, east: float, min_km: float
) -> None:
    other = (max(-90, min(90, lat + north * min_km)), max(-180, min(180, lon + east * min_km)))
    distance = haversine_km(lat, lon, *other)
    kept, _ = data.keep_apart(
        places(("t", *other, None)), places(("e", lat, lon, None)), min_km=min_km
    )
    if abs(distance - min_km) > 1e-6:
        assert (kept.height == 1) == (distance > min_km)


PHOTOS = [("1", 1.0, 2.0, "NA"), ("0002", 3.0, 4.0, "FR"), ("3", 5.0, 6.0, "DE")]


def test_a_split_comes_back_in_its_order_and_a_limit_is_a_prefix(
    tmp_path: Path, make_split: Callable[..., Path]
) -> None:
    folder = make_split(tmp_path / "my data", PHOTOS)
    split = data.load_split(folder, "eval_osv")
    assert [(p.id, p.latitude, p.longitude, p.country_iso2) for p in split.photos] == PHOTOS
    assert split.photos[1].path == folder / "images/0002.jpg"
    assert split.role == "evaluation" and len(split.fingerprint) == 16
    for limit in (1, 2, 3, 99):
        short = data.load_split(folder, "eval_osv", limit=limit)
        assert short.photos == split.photos[:limit]
        assert short.fingerprint == split.fingerprint


def test_an_unknown_split_names_the_splits_there_are(
    tmp_path: Path, make_split: Callable[..., Path]
) -> None:
    with pytest.raises(UserError, match=r"no split 'eval'; run scripts/prepare_data\.py"):
        data.load_split(tmp_path, "eval")
    make_split(tmp_path, PHOTOS)
    make_split(tmp_path, PHOTOS, name="eval_quick")
    with pytest.raises(UserError, match="no split 'eval'; it holds eval_osv, eval_quick"):
        data.load_split(tmp_path, "eval")


def test_a_split_that_does_not_fit_its_manifest_is_refused(
    tmp_path: Path, make_split: Callable[..., Path]
) -> None:
    path = make_split(tmp_path, PHOTOS) / "eval_osv.parquet"
    table = pl.read_parquet(path)
    for changed, says in (
        (table.head(2), "2 rows and its manifest 3"),
        (table.with_columns(pl.col("image_path").str.replace("/1", "/9")), "other photos"),
        (table.drop("country_iso2"), "no column 'country_iso2'"),
    ):
        artifacts.write_parquet(path, changed)
        with pytest.raises(UserError, match=says):
            data.load_split(tmp_path, "eval_osv")
    artifacts.write_parquet(path, table.drop("sub_region", "creator"))
    assert len(data.load_split(tmp_path, "eval_osv").photos) == 3
    data.manifest_path(tmp_path, "eval_osv").unlink()
    with pytest.raises(UserError, match=r"manifest\.json does not exist; run scripts/prepare"):
        data.load_split(tmp_path, "eval_osv")


def manifest(photos: list[tuple[str, float, float, str]], **hashes: str) -> dict[str, object]:
    keys = ("image_path", "latitude", "longitude", "country_iso2")
    rows = [dict(zip(keys, (f"i/{p[0]}.jpg", *p[1:]), strict=True)) for p in photos]
    table = pl.DataFrame(rows, schema=PHOTO_SCHEMA)
    sha256 = {**{photo[0]: "0" for photo in photos}, **hashes}
    return data.build_manifest("s", "train", table, sha256, image_policy={}, dataset={})


def test_a_fingerprint_goes_by_photos_labels_bytes_and_order() -> None:
    # The order decides blocks, a limit's prefix and the order of training.
    one = manifest(PHOTOS)
    assert manifest(PHOTOS)["fingerprint"] == one["fingerprint"]
    assert one["photos"] == sorted(one["photos"], key=lambda row: row["id"])
    assert one["rows"] == 3 and one["role"] == "train"
    others = [
        manifest(PHOTOS[::-1]),
        manifest(PHOTOS[:2]),
        manifest([*PHOTOS[:2], ("3", 5.0, 6.1, "DE")]),
        manifest([*PHOTOS[:2], ("3", 5.0, 6.0, "AT")]),
        manifest(PHOTOS, **{"3": "1"}),
    ]
    assert len({item["fingerprint"] for item in [one, *others]}) == 6


def test_an_evaluation_split_may_not_be_trained_on(
    tmp_path: Path, make_split: Callable[..., Path]
) -> None:
    make_split(tmp_path, PHOTOS)
    split = data.load_split(tmp_path, "eval_osv")
    with pytest.raises(UserError, match=r"'eval_osv' .* is for evaluation; train on train_pool"):
        data.require_train_role(split, tmp_path)


def test_a_train_split_that_shares_a_photo_with_evaluation_is_refused(
    tmp_path: Path, make_split: Callable[..., Path]
) -> None:
    make_split(tmp_path, PHOTOS[:1])
    make_split(tmp_path, PHOTOS[1:], name="train_pool", role="train")
    make_split(tmp_path, PHOTOS[1:], name="train_learnable", role="train")
    data.require_train_role(data.load_split(tmp_path, "train_pool"), tmp_path)
    make_split(tmp_path, [PHOTOS[0], PHOTOS[2]], name="eval_mine")
    with pytest.raises(UserError, match="'train_pool' shares 1 photos with 'eval_mine', 3 among"):
        data.require_train_role(data.load_split(tmp_path, "train_pool"), tmp_path)


def test_a_run_s_order_is_a_permutation_each_epoch_and_a_longer_run_begins_alike(
    tmp_path: Path, make_split: Callable[..., Path]
) -> None:
    make_split(tmp_path, [(str(n), 1.0, 2.0, "FR") for n in range(10)])
    photos = data.load_split(tmp_path, "eval_osv").photos
    order = data.lay_out(photos, 35, seed=1)
    assert len(order) == 35
    for start in (0, 10, 20):
        assert sorted(p.id for p in order[start : start + 10]) == [str(n) for n in range(10)]
    assert order[:10] != order[10:20]
    assert data.lay_out(photos, 12, seed=1) == order[:12]
    assert data.lay_out(photos, 12, seed=2) != order[:12]


def test_the_columns_for_training_carry_the_labels_and_the_prompt(
    tmp_path: Path, make_split: Callable[..., Path]
) -> None:
    make_split(tmp_path, PHOTOS)
    photos = data.load_split(tmp_path, "eval_osv").photos
    for style in ("think", "direct"):
        columns = data.training_columns(photos, style)
        assert columns["country_iso2"] == ["NA", "FR", "DE"] and columns["id"][1] == "0002"
        assert {len(values) for values in columns.values()} == {3}
        assert [message["role"] for message in columns["prompt"][0]] == ["system", "user"]
    assert data.training_columns(photos, "think")["prompt"] != columns["prompt"]


def test_make_rows_keeps_its_promise_of_distance() -> None:
    rows = make_rows([f"{n:02d}" for n in range(60)])
    points = [(row["latitude"], row["longitude"]) for row in rows]
    assert len(set(points)) == 60
    near = min(haversine_km(*a, *b) for n, a in enumerate(points) for b in points[:n])
    assert near > 100


@pytest.mark.parametrize("text", ["[]", "{}", '{"rows": 3}', "{"])
def test_a_damaged_manifest_is_one_sentence(
    tmp_path: Path, make_split: Callable[..., Path], text: str
) -> None:
    make_split(tmp_path, PHOTOS)
    data.manifest_path(tmp_path, "eval_osv").write_text(text)
    with pytest.raises(UserError, match=r"prepare_data\.py first"):
        data.load_split(tmp_path, "eval_osv")


def test_a_cut_parquet_is_one_sentence(tmp_path: Path, make_split: Callable[..., Path]) -> None:
    make_split(tmp_path, PHOTOS)
    path = tmp_path / "eval_osv.parquet"
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(UserError, match="is no whole parquet file"):
        data.load_split(tmp_path, "eval_osv")


def placed(places: dict[str, tuple[float, float, int]]) -> pl.DataFrame:
    """Candidates: for each country a latitude, a longitude and how many photos stand there."""
    rows = [
        {"id": f"{code}{n}", "country_iso2": code, "latitude": lat, "longitude": lon}
        for code, (lat, lon, count) in places.items()
        for n in range(count)
    ]
    return pl.DataFrame(rows)


def test_weights_fall_with_the_photos_of_a_cell() -> None:
    """1 / n^0.75 over cells of 1.8 by 3.6 degrees, as OSV-5M's authors draw."""
    latitude = np.array([10.0, 10.5, 10.6, 11.9, -90.0, 90.0, 10.0])
    longitude = np.array([20.0, 20.1, 21.0, 20.0, -180.0, 180.0, 22.0])
    weights = data.density_weights(latitude, longitude)
    # Cell edges: latitude 9, 10.8, 12.6; longitude 18, 21.6, 25.2.
    assert weights == pytest.approx([3**-0.75] * 3 + [1.0] * 4)


def test_sparse_places_are_drawn_more_often_than_uniformly() -> None:
    rows = placed({"DE": (50, 10, 900), "MN": (46, 104, 60), "TD": (15, 18, 40)})
    shares = {}
    for sampling in ("uniform", "inverse_density"):
        drawn = [
            identifier
            for seed in range(20)
            for identifier in data.draw_train(
                rows, TrainPool(sampling=sampling, size=100), seed=seed
            )[0]
        ]
        assert len(drawn) == 2000
        shares[sampling] = country_counts(drawn)["DE"] / len(drawn)
    assert shares["uniform"] == pytest.approx(0.9, abs=0.02)
    # 900^0.25 against 60^0.25 and 40^0.25, less since the small ones run out.
    assert 0.45 < shares["inverse_density"] < 0.6


def test_weighted_draws_are_those_of_successive_sampling() -> None:
    """The chance to be drawn first is the weight's share."""
    rows = placed({"AA": (0, 0, 1), "BB": (40, 40, 16)})
    firsts = Counter(
        data.draw_train(rows, TrainPool(sampling="inverse_density", size=1), seed=seed)[0][0][:2]
        for seed in range(3000)
    )
    # One photo of weight 1 against 16 of weight 1/8.
    assert firsts["AA"] / 3000 == pytest.approx(1 / 3, abs=0.03)


@pytest.mark.parametrize("sampling", ["uniform", "inverse_density", "cap"])
def test_each_draw_is_whole_repeatable_and_independent_of_the_row_order(sampling: str) -> None:
    rows = placed({"DE": (50, 10, 30), "MN": (46, 104, 20), "NA": (-22, 17, 1)})
    rules = TrainPool(sampling=sampling, size=12, cap=4)
    drawn, spares = data.draw_train(rows, rules, seed=3)
    assert len(drawn) == len(set(drawn)) == (9 if sampling == "cap" else 12)
    assert list(spares) == ["DE", "MN", "NA"]
    assert sorted([*drawn, *(one for ids in spares.values() for one in ids)]) == sorted(rows["id"])
    assert all(one.startswith(code) for code, ids in spares.items() for one in ids)
    shuffled = rows.sample(fraction=1, shuffle=True, seed=1)
    assert data.draw_train(shuffled, rules, seed=3) == (drawn, spares)
    assert data.draw_train(rows, rules, seed=4)[0] != drawn


def test_a_larger_weighted_draw_holds_the_smaller() -> None:
    rows = placed({"DE": (50, 10, 30), "MN": (46, 104, 20)})
    few, many = (
        set(data.draw_train(rows, TrainPool(sampling="uniform", size=size), seed=1)[0])
        for size in (10, 20)
    )
    assert few < many


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 2**256 - 1), min_size=1, max_size=8),
    st.lists(st.integers(0, 2**256 - 1), min_size=1, max_size=8),
)
def test_the_nearest_hash_is_found_with_its_distance(ours: list[int], others: list[int]) -> None:
    bits, nearest = data.nearest_hash(ours, others)
    for value, distance, position in zip(ours, bits, nearest, strict=True):
        distances = [(value ^ other).bit_count() for other in others]
        assert distance == min(distances) == distances[position]


def test_no_hash_has_no_nearest() -> None:
    assert data.nearest_hash([], [1]) == ([], [])
