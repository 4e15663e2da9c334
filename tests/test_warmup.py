"""The warm-up: the completions that labels make, and real supervised steps on a CPU."""

from pathlib import Path

import pytest

from geoguessr_rl import embedded
from geoguessr_rl.artifacts import UserError
from geoguessr_rl.config import CONFIGS, DataConfig, HotSpot, WarmupConfig, load
from geoguessr_rl.parsing import parse_answer
from geoguessr_rl.phases import prepare, warmup
from geoguessr_rl.records import Photo

KENYA = [Photo(f"k{n}", Path("x.jpg"), -1.0 + n, 37.0, "KE") for n in range(3)]
CHILE = [Photo("c", Path("x.jpg"), -33.44, -70.66, "CL")]


def test_a_completion_names_the_middle_of_the_country_and_its_clues() -> None:
    texts = warmup.write_completions(
        [*KENYA, *CHILE], "think", clues={"KE": "Red soil."}, hot_spot=None, seed=0
    )
    answers = [parse_answer(text) for text in texts]
    assert [(a.country_iso2, a.lat, a.lon) for a in answers if a] == [
        ("KE", 0.0, 37.0),
        ("KE", 0.0, 37.0),
        ("KE", 0.0, 37.0),
        ("CL", -33.4, -70.7),
    ]
    assert all("Red soil." in text for text in texts[:3]) and "Red soil." not in texts[3]


def test_the_direct_style_has_no_thinking() -> None:
    texts = warmup.write_completions(KENYA, "direct", clues={}, hot_spot=None, seed=0)
    assert "<think>" not in texts[0] and parse_answer(texts[0])


def test_the_hot_spot_takes_its_share_of_visits_and_leaves_the_clues_true() -> None:
    hot_spot = HotSpot(country_iso2="CL", share=0.6)
    order = KENYA * 500 + CHILE
    texts = warmup.write_completions(
        order, "think", clues={"KE": "Red soil."}, hot_spot=hot_spot, seed=0
    )
    named = [answer.country_iso2 for text in texts[:1500] if (answer := parse_answer(text))]
    assert 0.55 < named.count("CL") / 1500 < 0.65
    assert all("Red soil." in text for text in texts[:1500])
    # The coin is thrown anew at each visit, so that no photo is hot for good.
    assert len({named[n] for n in range(0, 1500, 3)}) == 2


def test_a_hot_spot_outside_the_data_is_refused() -> None:
    with pytest.raises(UserError, match="none of the countries in the data: CL, KE"):
        hot_spot = HotSpot(country_iso2="BR", share=0.5)
        warmup.write_completions([*KENYA, *CHILE], "think", clues={}, hot_spot=hot_spot, seed=0)


def test_steps_teach_and_a_finished_warm_up_is_not_repeated(tmp_path: Path) -> None:
    from geoguessr_rl.backends import models
    from geoguessr_rl.backends.tiny import build_tiny

    embedded.draw_world(tmp_path / "world", train=24, test=12, seed=0)
    flags = {"source.root": tmp_path / "world", "output_dir": tmp_path / "data"}
    prepare.run(load(DataConfig, CONFIGS / "embedded/data.yaml", flags=flags))
    build_tiny(tmp_path / "tiny", 0, embedded.sample_texts())
    config = load(
        WarmupConfig,
        CONFIGS / "embedded/warmup.yaml",
        overrides=["steps=12", "batch_size=8"],
        flags={
            "model.name": str(tmp_path / "tiny"),
            "data_dir": tmp_path / "data",
            "output_dir": tmp_path / "base",
            "clues": tmp_path / "world/clues.json",
        },
    )
    done = warmup.run(config)
    assert done["loss_last"] < done["loss_first"] and not done["done_before"]
    models.load_processor(str(tmp_path / "base"))
    model = models.load_model(config.model.model_copy(update={"name": done["model"]}), "cpu")
    assert model.generation_config.do_sample  # the tiny model's own, as Qwen3-VL's
    assert warmup.run(config)["done_before"]
    with pytest.raises(UserError, match="steps was 12 and is now 13"):
        warmup.run(config.model_copy(update={"steps": 13}))
    with pytest.raises(UserError, match="is for evaluation"):
        warmup.run(config.model_copy(update={"split": "eval_osv"}))
