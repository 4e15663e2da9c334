"""One frozen pydantic class for each YAML file, the only YAML reader, and the command line.

Defaults < file < `--set a.b=value` < named flags, validated once. A key that is unknown, given
twice or ill-typed is an error that names the key, the file and the nearest valid key. Constants
that define a measurement live in code; what a user tunes lives in these files. It is long because
every key, its default and its bounds are looked up in one place.
"""

import argparse
import difflib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import pydantic
from pydantic import BeforeValidator, Field, PositiveFloat
from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import YAMLError

from geoguessr_rl.artifacts import UserError
from geoguessr_rl.prompt import MAX_COMPLETION_TOKENS, PromptStyle
from geoguessr_rl.reward import RewardShape

FLAG_NAMES = {"model.name": "model", "source.root": "source"}  # else a key's last part
CONFIGS = Path(__file__).resolve().parent.parent / "configs"


def _no_boolean(value: Any) -> Any:
    """Refuses true and false, which pydantic takes for 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("Input should be a whole number")
    return value


PositiveInt = Annotated[int, Field(gt=0), BeforeValidator(_no_boolean)]
FolderName = Annotated[str, Field(pattern=r"^\w[\w. -]*$")]
Share = Annotated[float, Field(ge=0, le=1)]
View = Literal["crop", "strip", "quad"]
Engine = Literal["local", "ray"]
AlarmName = Literal[
    "format_collapse", "zero_spread", "entropy_collapse", "one_country", "drift", "overfit"
]
PRICE_PER_HOUR = 1.39  # dollars for an A100 80 GB on RunPod's secure cloud
C = TypeVar("C", bound="Section")


class Section(pydantic.BaseModel):
    """The base of every config class: frozen, and unknown keys are errors."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class ImagePolicy(Section):
    """The size every stored photo has, so that no later processor resizes anything.

    Pixels are areas; one visual token of Qwen3-VL covers 32 × 32 of them.
    """

    long_edge: PositiveInt = 1024
    multiple: PositiveInt = 32
    min_pixels: PositiveInt = 200_704
    max_pixels: PositiveInt = 802_816
    jpeg_quality: Annotated[int, Field(ge=1, le=95)] = 95

    @pydantic.model_validator(mode="after")
    def _satisfiable(self) -> "ImagePolicy":
        largest = (self.long_edge // self.multiple * self.multiple) ** 2
        if not self.min_pixels <= min(self.max_pixels, largest):
            raise ValueError(
                f"min_pixels {self.min_pixels} exceeds max_pixels {self.max_pixels} or the "
                f"{largest} pixels that long_edge and multiple allow"
            )
        return self


class Source(Section):
    """Where the photos come from: a local folder in the OSV-5M layout, or the Hub.

    A `revision` that is no commit hash is resolved once, when the output folder is begun.
    """

    root: Path | None = None
    repo: str = "osv5m/osv5m"
    revision: str = "main"
    train: Annotated[list[int], Field(min_length=1)] = [0, 1]
    test: Annotated[list[int], Field(min_length=1)] = [0]


class Pano(Section):
    """The second evaluation set, of street-view panoramas. Google's: they never leave the machine.

    `root` is a folder of parquet files; without one they come from the Hub, unless the photos come
    from a local folder. `view` says what of a panorama becomes the photo: `crop` cuts one view,
    `strip` keeps it whole, `quad` sets its four quarters in a grid. With a size of 0 there is no
    pano set.
    """

    root: Path | None = None
    repo: str = "stochastic/random_streetview_images_pano_v0.0.2"
    revision: str = "main"
    size: Annotated[int, Field(ge=0), BeforeValidator(_no_boolean)] = 500
    view: View = "crop"


class TrainPool(Section):
    """Which rows the model may train on.

    `cap` takes at most that many photos a country. `inverse_density` and `uniform` draw `size`
    photos, in sparse places more often and everywhere alike.
    """

    sampling: Literal["cap", "inverse_density", "uniform"] = "cap"
    cap: PositiveInt = 400
    size: PositiveInt = 20_000


class EvalDraw(Section):
    """How the frozen evaluation rows are drawn: photos of every country, round by round.

    `rounds` is the floor a country gets, as far as `size` and its photos reach.
    """

    size: PositiveInt = 1000
    quick: PositiveInt = 300
    rounds: PositiveInt = 10


class Contamination(Section):
    """How far train rows stay away from evaluation rows.

    `max_hash_bits` of 256 is the distance up to which two perceptual hashes are one photo; null
    leaves the comparison out.
    """

    min_km: Annotated[float, Field(ge=0)] = 1.0
    max_hash_bits: Annotated[int, Field(ge=0, lt=128), BeforeValidator(_no_boolean)] | None = 40


class Screen(Section):
    """What makes a photo unfit to play with; every rule is off by default."""

    text: bool = False
    blank: bool = False
    max_aspect: Annotated[float, Field(ge=1)] | None = None


class Ray(Section):
    """The cluster on which `engine: ray` works, and what each worker takes of it.

    Without `address` a local cluster is started. Without `workers` there is one a GPU, on a CPU one
    a core.
    """

    address: str | None = None
    workers: PositiveInt | None = None
    num_cpus: PositiveFloat = 1.0
    num_gpus: Annotated[float, Field(ge=0)] | None = None


class DataConfig(Section):
    """`configs/data.yaml`: prepare."""

    source: Source = Source()
    output_dir: Path = Path("data")
    image: ImagePolicy = ImagePolicy()
    train: TrainPool = TrainPool()
    eval: EvalDraw = EvalDraw()
    contamination: Contamination = Contamination()
    screen: Screen = Screen()
    pano: Pano = Pano()
    workers: PositiveInt | None = None
    engine: Engine = "local"
    ray: Ray = Ray()
    seed: int = 42
    limit: PositiveInt | None = None


class Model(Section):
    """The base model, by Hub name or folder."""

    name: str = "Qwen/Qwen3-VL-4B-Instruct"
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"


class Prompt(Section):
    """Which of the two prompt styles is used."""

    style: PromptStyle = "think"


class VllmEngine(Section):
    """What vLLM may take of the machine, when it is the sampler."""

    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.85
    max_model_len: PositiveInt = 4096


class Api(Section):
    """An OpenAI-compatible server; its address and key are OPENAI_BASE_URL and OPENAI_API_KEY.

    `tries` counts all attempts of one request. Prices are dollars for a million tokens.
    """

    concurrency: PositiveInt = 16
    requests_per_minute: PositiveInt | None = None
    tries: PositiveInt = 6
    timeout_seconds: PositiveFloat = 120.0
    price_prompt: Annotated[float, Field(ge=0)] | None = None
    price_completion: Annotated[float, Field(ge=0)] | None = None


class Generation(Section):
    """How completions are made.

    `block_size` photos are generated, written and resumed together.
    """

    backend: Literal["vllm", "transformers", "openai", "scripted"] = "vllm"
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"
    block_size: PositiveInt = 256
    batch_size: PositiveInt = 16
    max_tokens: PositiveInt = MAX_COMPLETION_TOKENS
    temperature: Annotated[float, Field(ge=0)] = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: int = 42
    vllm: VllmEngine = VllmEngine()
    api: Api = Api()
    script: Literal["constant", "random_land", "train_prior"] | Path = "constant"


class EvalConfig(Section):
    """`configs/eval.yaml`: evaluate a model on a frozen split."""

    model: Model = Model()
    lora: Path | None = None
    prompt: Prompt = Prompt()
    generation: Generation = Generation()
    samples: PositiveInt = 1
    data_dir: Path = Path("data")
    split: FolderName = "eval_osv"
    run_name: FolderName = "base"
    output_dir: Path = Path("outputs/eval")
    allow_base_mismatch: bool = False
    engine: Engine = "local"
    ray: Ray = Ray()
    limit: PositiveInt | None = None


class FilterConfig(Section):
    """`configs/filter.yaml`: keep the photos that GRPO can learn from."""

    model: Model = Model()
    lora: Path | None = None
    prompt: Prompt = Prompt()
    generation: Generation = Generation(temperature=1.0, top_p=0.95)
    data_dir: Path = Path("data")
    output_dir: Path = Path("outputs/filter")
    rows: PositiveInt = 8000
    cap: PositiveInt = 200
    completions: Annotated[int, Field(ge=2)] = 4
    min_std: PositiveFloat = 0.08
    fallback_std: PositiveFloat = 0.05
    min_rows: Annotated[int, Field(ge=0)] = 1500
    rest_share: Share = 0.2
    engine: Engine = "local"
    ray: Ray = Ray()
    seed: int = 42
    limit: PositiveInt | None = None


class HotSpot(Section):
    """A country that the warmed-up model over-predicts, to give GRPO something to unlearn."""

    country_iso2: str
    share: Share


class WarmupConfig(Section):
    """`configs/warmup.yaml`: supervised steps for a model that lacks the answer format."""

    model: Model = Model()
    prompt: Prompt = Prompt()
    data_dir: Path = Path("data")
    split: FolderName = "train_pool"
    output_dir: Path = Path("outputs/warmup")
    clues: Path | None = None
    hot_spot: HotSpot | None = None
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"
    steps: PositiveInt = 200
    batch_size: PositiveInt = 8
    learning_rate: PositiveFloat = 1e-5
    seed: int = 42
    limit: PositiveInt | None = None


class RewardConfig(Section):
    """The shape of the reward that GRPO rollouts use; evaluation always uses the default."""

    shape: str = "two_scale"
    parameters: dict[str, Any] = {}

    @pydantic.model_validator(mode="after")
    def _known_shape(self) -> "RewardConfig":
        self.build()
        return self

    def build(self) -> RewardShape:
        """Returns the shape; raises ValueError that names the valid values."""
        parameters = {
            key: tuple(tuple(item) if isinstance(item, list) else item for item in value)
            if isinstance(value, list)
            else value
            for key, value in self.parameters.items()
        }
        try:
            return RewardShape(name=self.shape, **parameters)  # type: ignore[arg-type]
        except TypeError as error:
            raise ValueError(str(error)) from None


class Lora(Section):
    """The adapter, on the language model's projections only."""

    r: PositiveInt = 32
    alpha: PositiveInt = 64
    dropout: Share = 0.0
    target_modules: list[str] = [
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    ]  # fmt: skip
    exclude_modules: str = r".*visual.*"


class Stop(Section):
    """Which alarms end a run; none by default, since runs that look alarming can be the best."""

    on: list[AlarmName] = []


class GrpoConfig(Section):
    """`configs/grpo.yaml`: our typed sections, and TRL's `GRPOConfig` verbatim as `trainer`.

    `samples_every` is the steps between two tables of sample completions. `dollars_per_hour` is the
    price of all GPUs together.
    """

    model: Model = Model()
    prompt: Prompt = Prompt()
    data_dir: Path = Path("data")
    split: FolderName = "train_learnable"
    lora: Lora = Lora()
    reward: RewardConfig = RewardConfig()
    trainer: dict[str, Any] = {}
    samples_every: PositiveInt = 20
    stop: Stop = Stop()
    dollars_per_hour: PositiveFloat = PRICE_PER_HOUR
    resume_from_checkpoint: str | None = None
    seconds_per_step: PositiveFloat | None = None
    budget_hours: PositiveFloat | None = None
    dry_run: bool = False
    limit: PositiveInt | None = None


class ExportConfig(Section):
    """`configs/export.yaml`: merge an adapter into its base, and push either or both to the Hub.

    `photos` of the split are answered by both, to see that they are one model. `base_repo_id` says
    where a base that lies in a folder is on the Hub. `base_run` and `tuned_run` are evaluations
    without and with the adapter, whose figures the model card shows. With `space`, the demo of base
    and adapter is written there instead, with `report`.
    """

    model: Model = Model()
    lora: Path = Path("outputs/grpo-qwen3vl4b")
    prompt: Prompt = Prompt()
    data_dir: Path = Path("data")
    split: FolderName = "eval_quick"
    photos: PositiveInt = 16
    output_dir: Path = Path("outputs/merged")
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"
    push: Literal["adapter", "merged", "both"] | None = None
    repo_id: str | None = None
    base_repo_id: str | None = None
    private: bool = True
    base_run: Path | None = None
    tuned_run: Path | None = None
    space: Path | None = None
    report: Path = Path("outputs/report.html")


class DemoConfig(Section):
    """`configs/demo.yaml`: the page on which people use a model.

    Without `model` it is the base of `lora`, and without either what the quickstart trained last,
    with its data and its report.
    """

    model: Model | None = None
    lora: Path | None = None
    prompt: Prompt = Prompt()
    data_dir: Path = Path("data")
    split: FolderName = "eval_osv"
    report: Path = Path("outputs/report.html")
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"
    max_tokens: PositiveInt = MAX_COMPLETION_TOKENS
    max_samples: Annotated[int, Field(ge=1, le=32)] = 8
    allow_base_mismatch: bool = False
    waiting: PositiveInt = 20
    tiles: str | None = None
    tiles_credit: str = "© OpenStreetMap contributors"
    listen: bool = False
    share: bool = False
    port: Annotated[int, Field(ge=1, le=65535)] = 7860


def _one_line(error: Exception) -> str:
    """Returns an error's text without its line breaks."""
    return " ".join(str(error).split())


def _read_yaml(path: Path) -> dict[str, Any]:
    """Reads a YAML 1.2 mapping (`NO` is text, `1e-6` a number); duplicate keys are errors."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        value = YAML(typ="safe", pure=True).load(text)
    except FileNotFoundError:
        raise UserError(f"the config file {path} does not exist; give one with --config") from None
    except (IsADirectoryError, UnicodeDecodeError) as error:
        raise UserError(f"the config file {path} cannot be read ({error})") from None
    except DuplicateKeyError as error:
        line = error.problem_mark.line + 1
        raise UserError(f"{path}, line {line}: {error.problem}; keep one of them") from None
    except YAMLError as error:
        raise UserError(f"{path} is not valid YAML: {_one_line(error)}") from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold keys and values, and holds a {type(value).__name__}")
    return value


def _assign(tree: dict[str, Any], dotted: str, value: Any) -> None:
    """Sets `a.b.c` in nested dicts."""
    *parents, last = dotted.split(".")
    for key in parents:
        if not isinstance(tree.get(key), dict):
            tree[key] = {}
        tree = tree[key]
    tree[last] = value


def _valid_keys(cls: type[pydantic.BaseModel], location: Sequence[str | int]) -> list[str]:
    """Returns the keys that are valid beside the last part of an error's location."""
    for part in location[:-1]:
        field = cls.model_fields.get(str(part))
        if field is None:
            return []
        options = [field.annotation, *getattr(field.annotation, "__args__", ())]
        sections = [o for o in options if isinstance(o, type) and issubclass(o, Section)]
        if not sections:
            return []
        cls = sections[0]
    return list(cls.model_fields)


def nearest(key: str, valid: Sequence[str]) -> str:
    """Returns a hint that names the valid key nearest to a misspelt one, or all of them."""
    close = difflib.get_close_matches(key, valid, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"valid keys are {', '.join(valid)}"


def load(
    cls: type[C],
    path: Path,
    *,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
) -> C:
    """Reads and validates one config.

    Args:
        cls: The config class of the file.
        path: The YAML file.
        overrides: `a.b=value` texts; the value is read as YAML.
        flags: Dotted key to value; None means that the flag was not given.

    Raises:
        UserError: The file or a key is missing, unknown, given twice or ill-typed.
    """
    tree = _read_yaml(path)
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UserError(f"--set {text} must look like a.b=value")
        try:
            _assign(tree, key, YAML(typ="safe", pure=True).load(value))
        except YAMLError as error:
            raise UserError(f"--set {text} is not valid YAML: {_one_line(error)}") from None
    for key, value in (flags or {}).items():
        if value is not None:
            _assign(tree, key, value)
    try:
        return cls.model_validate(tree)
    except pydantic.ValidationError as error:
        # A misspelt key explains a missing one, not the other way round.
        first = min(error.errors(), key=lambda found: found["type"] != "extra_forbidden")
        location = [part for part in first["loc"] if isinstance(part, str)]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        if (flags or {}).get(where) is not None:
            flag = FLAG_NAMES.get(where, where)
            raise UserError(
                f"--{flag.rpartition('.')[2]} {first['input']} is wrong: {first['msg']}"
            ) from None
        if first["type"] == "extra_forbidden":
            hint = nearest(str(first["loc"][-1]), _valid_keys(cls, location))
            raise UserError(f"{path}: unknown key {where!r}; {hint}") from None
        message = first["msg"].removeprefix("Value error, ")
        raise UserError(f"{path}: {where} = {first['input']!r} is wrong: {message}") from None


def add_config_flags(parser: argparse.ArgumentParser, phase: str, *, limit: bool = True) -> None:
    """Adds `--config`, `--set` and `--limit`, which every phase script takes."""
    parser.add_argument(
        "--config", type=Path, default=CONFIGS / f"{phase}.yaml", help="the phase's YAML file"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="A.B=VALUE", help="override one config key"
    )
    if limit:
        parser.add_argument(
            "--limit", metavar="N", help="use the first N photos only; a later run extends them"
        )


def run_script(main: Callable[[], None]) -> None:
    """Runs a script's main function: a user's mistake is one sentence and exit code 2."""
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(
            "interrupted; run the command again to continue (train_grpo.py with "
            "--resume_from_checkpoint auto)",
            file=sys.stderr,
        )
        sys.exit(130)
