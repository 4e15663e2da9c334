"""Configs: what the YAML files hold is what the phases get, and a mistake is one sentence."""

import re
from pathlib import Path

import pytest

from geoguessr_rl import config
from geoguessr_rl.artifacts import UserError
from geoguessr_rl.config import (
    CONFIGS,
    DataConfig,
    EvalConfig,
    FilterConfig,
    GrpoConfig,
    RewardConfig,
    WarmupConfig,
    load,
)
from geoguessr_rl.reward import SHAPE_NAMES

ROOT = Path(__file__).parents[1]
CLASSES = {
    "data": DataConfig,
    "eval": EvalConfig,
    "filter": FilterConfig,
    "warmup": WarmupConfig,
    "grpo": GrpoConfig,
}
CHECKED_IN = sorted((ROOT / "configs").rglob("*.yaml"))


def class_of(path: Path) -> type[config.Section]:
    """The config class of a file: by its name, or by the phase that its name begins with."""
    for stem in (path.stem, path.stem.split("_")[0], path.stem.split("-")[0], path.parent.name):
        name = f"{stem.title().replace('_', '')}Config"
        if stem in CLASSES or hasattr(config, name):
            return CLASSES.get(stem) or getattr(config, name)
    # An ablation of another name overrides keys of GRPO.
    return GrpoConfig


def write(folder: Path, text: str) -> Path:
    path = folder / "a config.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(cls: type[config.Section], path: Path, **more: object) -> str:
    with pytest.raises(UserError) as refused:
        load(cls, path, **more)  # type: ignore[arg-type]
    text = str(refused.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("path", CHECKED_IN, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_checked_in_config_loads(path: Path) -> None:
    load(class_of(path), path)


def test_every_phase_has_its_config_checked_in() -> None:
    assert {f"{name}.yaml" for name in CLASSES} <= {path.name for path in CHECKED_IN}


@pytest.mark.parametrize("name", CLASSES)
def test_a_checked_in_config_says_the_defaults_of_the_class(name: str, tmp_path: Path) -> None:
    """A value stands in one place of truth: without the file, a phase does the same."""
    of_file = load(CLASSES[name], ROOT / "configs" / f"{name}.yaml").model_dump()
    of_class = load(CLASSES[name], write(tmp_path, "")).model_dump()
    if name == "grpo":  # TRL's own section has no class here
        of_file.pop("trainer")
        of_class.pop("trainer")
    assert of_file == of_class


@pytest.mark.parametrize("text", ["", "\n", "# nothing\n", "\ufeff", "---\n"])
def test_an_empty_file_gives_the_defaults(text: str, tmp_path: Path) -> None:
    assert load(EvalConfig, write(tmp_path, text)) == EvalConfig()


@pytest.mark.parametrize(
    ("text", "rate"),
    [("1e-6", 1e-6), ("1.0e-6", 1e-6), ("0.000001", 1e-6), ("1E-6", 1e-6), ("'1e-6'", 1e-6)],
)
def test_1e_6_is_a_number(text: str, rate: float, tmp_path: Path) -> None:
    assert load(WarmupConfig, write(tmp_path, f"learning_rate: {text}")).learning_rate == rate


def test_1e_6_is_a_number_in_the_section_that_is_passed_on_verbatim(tmp_path: Path) -> None:
    path = write(tmp_path, "trainer:\n  learning_rate: 1e-6\n  beta: 0.0\n")
    rate = load(GrpoConfig, path).trainer["learning_rate"]
    assert isinstance(rate, float) and rate == 1e-6
    again = load(GrpoConfig, path, overrides=["trainer.learning_rate=3e-6"])
    assert again.trainer == {"learning_rate": 3e-6, "beta": 0.0}


def test_norway_stays_text(tmp_path: Path) -> None:
    path = write(tmp_path, "trainer:\n  countries: [NO, SE, on, yes]\n")
    assert load(GrpoConfig, path).trainer["countries"] == ["NO", "SE", "on", "yes"]
    text = "hot_spot: {country_iso2: NO, share: 0.5}"
    spot = load(WarmupConfig, write(tmp_path, text)).hot_spot
    assert spot is not None and spot.country_iso2 == "NO"
    path = write(tmp_path, "")
    assert load(EvalConfig, path, overrides=["run_name=NO"]).run_name == "NO"
    assert load(EvalConfig, path, overrides=["split=NA"]).split == "NA"


@pytest.mark.parametrize(
    "text",
    ["split: a\nrun_name: b\nsplit: c\n", "generation:\n  seed: 1\n  backend: vllm\n  seed: 2\n"],
)
def test_a_duplicate_key_is_refused_with_its_line(text: str, tmp_path: Path) -> None:
    path = write(tmp_path, text)
    message = refusal(EvalConfig, path)
    assert str(path) in message and "duplicate key" in message
    assert ("split" in message and "line 3" in message) or (
        "seed" in message and "line 4" in message
    )


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    message = refusal(EvalConfig, tmp_path / "gone.yaml")
    assert "gone.yaml" in message and "does not exist" in message
    assert str(tmp_path) in refusal(EvalConfig, tmp_path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- a\n- b\n", "list"),
        ("just text", "str"),
        ("a: [1, 2", "not valid YAML"),
        ("a: b: c", "not valid YAML"),
        ("a: !!python/object:os.system x", "not valid YAML"),
        ("\tsplit: x", "not valid YAML"),
    ],
)
def test_a_file_that_is_no_mapping_is_refused(text: str, says: str, tmp_path: Path) -> None:
    path = write(tmp_path, text)
    message = refusal(EvalConfig, path)
    assert str(path) in message and says in message


def test_a_file_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "latin.yaml"
    path.write_bytes("split: Besançon".encode("latin-1"))
    assert str(path) in refusal(EvalConfig, path)


@pytest.mark.parametrize(
    ("cls", "text", "key", "nearest"),
    [
        (EvalConfig, "run_nam: x", "run_nam", "run_name"),
        (EvalConfig, "generation: {temprature: 1}", "generation.temprature", "temperature"),
        (
            EvalConfig,
            "generation: {vllm: {max_len: 1}}",
            "generation.vllm.max_len",
            "max_model_len",
        ),
        (DataConfig, "imge: {}", "imge", "image"),
        (DataConfig, "image: {longedge: 5}", "image.longedge", "long_edge"),
        (DataConfig, "source: {trian: [0]}", "source.trian", "train"),
        (GrpoConfig, "lora: {rank: 8}", "lora.rank", "r"),
        (GrpoConfig, "trainr: {}", "trainr", "trainer"),
        (WarmupConfig, "hot_spot: {contry_iso2: NO, share: 1}", "contry_iso2", "country_iso2"),
    ],
)
def test_a_misspelt_key_is_named_with_its_file_and_the_nearest_key(
    cls: type[config.Section], text: str, key: str, nearest: str, tmp_path: Path
) -> None:
    path = write(tmp_path, text)
    message = refusal(cls, path)
    assert str(path) in message and key in message
    assert f"'{nearest}'" in message or f" {nearest}," in message


def test_a_key_that_resembles_nothing_lists_the_valid_ones(tmp_path: Path) -> None:
    message = refusal(DataConfig, write(tmp_path, "eval: {qqqqq: 1}"))
    assert "size, quick, rounds" in message


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("limit: many", "limit"),
        ("limit: 0", "limit"),
        ("limit: -1", "limit"),
        ("limit: 1.5", "limit"),
        ("limit: [1]", "limit"),
        ("split: 3", "split"),
        ("generation: 7", "generation"),
        ("generation: {temperature: hot}", "generation.temperature"),
        ("generation: {temperature: -1}", "generation.temperature"),
        ("generation: {top_p: 0}", "generation.top_p"),
        ("generation: {top_p: 1.1}", "generation.top_p"),
        ("generation: {backend: magic}", "generation.backend"),
        ("prompt: {style: poem}", "prompt.style"),
        ("allow_base_mismatch: perhaps", "allow_base_mismatch"),
        ("generation: {block_size: 0}", "generation.block_size"),
    ],
)
def test_an_ill_typed_value_is_named_with_key_file_and_value(
    text: str, key: str, tmp_path: Path
) -> None:
    path = write(tmp_path, text)
    message = refusal(EvalConfig, path)
    assert str(path) in message and f"{key} = " in message and "is wrong" in message


def test_the_choices_of_a_key_are_listed(tmp_path: Path) -> None:
    message = refusal(EvalConfig, write(tmp_path, "generation: {backend: magic}"))
    assert "'vllm'" in message and "'transformers'" in message and "'scripted'" in message


def test_flags_win_over_set_over_the_file_over_the_defaults(tmp_path: Path) -> None:
    path = write(tmp_path, "generation: {seed: 1, block_size: 11}\nrun_name: file\nsplit: file\n")
    loaded = load(
        EvalConfig,
        path,
        overrides=["generation.seed=2", "run_name=set", "generation.batch_size=7"],
        flags={"run_name": "flag", "limit": "5", "split": None, "generation.seed": None},
    )
    assert loaded.generation.max_tokens == 512  # default
    assert (loaded.generation.block_size, loaded.split) == (11, "file")
    assert (loaded.generation.seed, loaded.generation.batch_size) == (2, 7)
    assert (loaded.run_name, loaded.limit) == ("flag", 5)


def test_the_last_set_of_a_key_wins_and_new_sections_are_made(tmp_path: Path) -> None:
    overrides = ["generation.vllm.max_model_len=1", "generation.vllm.max_model_len=99"]
    loaded = load(EvalConfig, write(tmp_path, ""), overrides=overrides)
    assert loaded.generation.vllm.max_model_len == 99
    loaded = load(DataConfig, write(tmp_path, ""), overrides=["source.train=[3, 4]"])
    assert loaded.source.train == [3, 4]


@pytest.mark.parametrize("text", ["run_name", "=x", "", "generation.seed:3", "split=[a"])
def test_a_malformed_set_is_refused(text: str, tmp_path: Path) -> None:
    message = refusal(EvalConfig, write(tmp_path, ""), overrides=[text])
    assert "--set" in message


def test_a_set_of_an_unknown_or_ill_typed_key_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "")
    assert "'run_name'" in refusal(EvalConfig, path, overrides=["run_nme=x"])
    assert "generation.seed" in refusal(EvalConfig, path, overrides=["generation.seed=x"])


@pytest.mark.parametrize("shape", SHAPE_NAMES)
def test_every_reward_shape_is_a_config_value(shape: str, tmp_path: Path) -> None:
    loaded = load(GrpoConfig, write(tmp_path, f"reward: {{shape: {shape}}}"))
    assert loaded.reward.build().name == shape


def test_a_bad_reward_shape_names_the_valid_ones(tmp_path: Path) -> None:
    path = write(tmp_path, "reward: {shape: cubic}")
    message = refusal(GrpoConfig, path)
    assert str(path) in message and "reward" in message
    assert all(name in message for name in SHAPE_NAMES)


@pytest.mark.parametrize(
    "text",
    [
        "parameters: {scale: 3}",
        "parameters: {scales_km: [0, 250]}",
        "parameters: {scales_km: near}",
        "parameters: {knots: [[0, 1]]}",
        "{shape: piecewise, parameters: {knots: [[0, 1], [750, 2]]}}",
        "{shape: piecewise, parameters: {knots: [0, 1]}}",
        "parameters: {format_weight: 0}",
        "parameters: {format_weight: much}",
    ],
)
def test_bad_parameters_of_a_reward_shape_are_one_sentence(text: str, tmp_path: Path) -> None:
    path = write(tmp_path, f"reward:\n  {text}")
    assert str(path) in refusal(GrpoConfig, path)


def test_knots_come_out_of_yaml_as_they_stand_there(tmp_path: Path) -> None:
    text = "reward: {shape: piecewise, parameters: {knots: [[0, 1], [500, 0.4], [20000, 0]]}}"
    shape = load(GrpoConfig, write(tmp_path, text)).reward.build()
    assert shape.knots == ((0, 1), (500, 0.4), (20000, 0))


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        RewardConfig().shape = "geoscore"


@pytest.mark.parametrize("value", ["true", "0", "-1", "1.5"])
def test_a_count_is_a_positive_whole_number(value: str) -> None:
    with pytest.raises(UserError, match=r"limit = .* is wrong"):
        load(EvalConfig, CONFIGS / "eval.yaml", overrides=[f"limit={value}"])


@pytest.mark.parametrize("name", ["../else", "a/b", "", "."])
def test_a_run_name_stays_inside_its_folder(name: str) -> None:
    with pytest.raises(UserError, match=f"--run_name {re.escape(name)} is wrong"):
        load(EvalConfig, CONFIGS / "eval.yaml", flags={"run_name": name})


def test_an_image_policy_that_no_photo_can_satisfy_is_refused() -> None:
    with pytest.raises(UserError, match="min_pixels 900000 exceeds max_pixels"):
        load(DataConfig, CONFIGS / "data.yaml", overrides=["image.min_pixels=900000"])
    with pytest.raises(UserError, match="long_edge and multiple allow"):
        load(DataConfig, CONFIGS / "data.yaml", overrides=["image.long_edge=320"])


def test_a_source_without_zips_is_refused() -> None:
    with pytest.raises(UserError, match=r"source\.test = \[\] is wrong"):
        load(DataConfig, CONFIGS / "data.yaml", overrides=["source.test=[]"])
