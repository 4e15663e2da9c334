"""The rules that keep the numbers honest: what each stops, and what gets through without it.

Each test runs twice. Guarded, the product refuses by name or gives the honest figure; unguarded,
exactly that guard is taken away, and the fault comes out as a plausible number without an error. A
guard that is not missed when it is gone guards nothing.
"""

import base64
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl
import pytest
from api_server import PAGE, ApiServer, Reply, Request, chat, now_and_then
from conftest import scene

from geoguessr_rl import artifacts, bootstrap, comparison, data, eval_metrics, prompt, runs
from geoguessr_rl.artifacts import UserError
from geoguessr_rl.backends import evaluation, models, openai, predictions
from geoguessr_rl.backends.scripted import ScriptedBackend
from geoguessr_rl.backends.tiny import build_tiny
from geoguessr_rl.config import CONFIGS, GrpoConfig, Lora, Model, load
from geoguessr_rl.phases import score, train
from geoguessr_rl.prompt import format_completion
from geoguessr_rl.records import Completion, Photo, Place, Prediction
from geoguessr_rl.reward import SCORE_VERSION

PHOTOS = [(f"p{n:02}", 44.0 + n / 4, 1.0 + n / 4, "FR") for n in range(12)]
RIGHT = {one: format_completion("France", lat, lon, style="direct") for one, lat, lon, _ in PHOTOS}
CONSTANT, RANDOM = "constant", "random_land"

both = pytest.mark.parametrize("guarded", [True, False], ids=["guarded", "unguarded"])
Script = Callable[..., Any]
Patch = pytest.MonkeyPatch


class Workshop:
    """A folder with a split, in which models are evaluated and compared by their scripts."""

    def __init__(self, folder: Path, script: Script) -> None:
        self.folder = folder
        self.script = script

    def run(self, name: str, answers: Any, *more: object, data: str = "data") -> Any:
        """Evaluates a baseline by its name, or answers by photo id."""
        if isinstance(answers, Mapping):
            path = self.folder / f"{name}.json"
            path.write_text(json.dumps(answers))
            answers = path
        scripted = ("--backend", "scripted", "--set", f"generation.script={answers}")
        return self.evaluate(name, *scripted, *more, data=data)

    def evaluate(self, name: str, *flags: object, data: str = "data") -> Any:
        return self.script(
            "run_eval.py", "--data_dir", self.folder / data, "--output_dir", self.folder / "eval",
            "--run_name", name, "--set", "generation.block_size=4", *flags,
        )  # fmt: skip

    def at(self, name: str) -> Path:
        return self.folder / "eval" / name / "eval_osv"

    def metrics(self, name: str) -> dict[str, Any]:
        return json.loads((self.at(name) / artifacts.METRICS).read_text())

    def texts(self, name: str) -> list[str]:
        rows = artifacts.read_rows(self.at(name) / artifacts.PREDICTIONS, Prediction)
        return [row.completion for row in rows]

    def compare(self, *names: str) -> Any:
        output = self.folder / "compared.json"
        output.unlink(missing_ok=True)
        return self.script("compare_runs.py", *map(self.at, names), "--output", output)

    def compared(self) -> dict[str, dict[str, Any]]:
        """The metrics of the last comparison, by name."""
        (found,) = json.loads((self.folder / "compared.json").read_text())["comparisons"]
        return {row["metric"]: row for row in found["metrics"]}


@pytest.fixture
def shop(tmp_path: Path, make_split: Callable[..., Path], script: Script) -> Workshop:
    """Twelve evaluation photos in France, with their files."""
    make_split(tmp_path / "data", PHOTOS)
    for n, (identifier, *_) in enumerate(PHOTOS):
        path = tmp_path / f"data/images/{identifier}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(scene(n))
    return Workshop(tmp_path, script)


def succeeded(ended: Any) -> bool:
    """Whether a script ended well; shows what it said where it did not."""
    assert ended.code == 0, ended.err
    return True


def without(monkeypatch: Patch, owner: Any, name: str, value: Any = None) -> None:
    """Takes one guard away: what it checked is accepted."""
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: value)


def compares_in_spite_of(monkeypatch: Patch, *keys: str) -> None:
    """Lets runs be compared that differ in these."""
    kept = tuple(key for key in runs.COMPARABLE if key not in keys)
    assert len(kept) == len(runs.COMPARABLE) - len(keys)
    monkeypatch.setattr(runs, "COMPARABLE", kept)


def leaves_out(monkeypatch: Patch, owner: Any, dropped: Callable[[Prediction], bool]) -> None:
    """Averages as the faulty scorers do: without the rows that look bad."""
    plain = owner.compute_metrics

    def flattering(rows: list[Prediction], *rest: Any, **more: Any) -> dict[str, Any]:
        return plain([row for row in rows if not dropped(row)], *rest, **more)

    monkeypatch.setattr(owner, "compute_metrics", flattering)


# --- 1 and 2: adapters


class Zoo(NamedTuple):
    """Two random models of one shape, and an adapter that was trained on the first."""

    base: Path
    other: Path
    adapter: Path


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zoo]:
    import torch
    from peft import get_peft_model

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more only wait for each other in a model this small
    root = tmp_path_factory.mktemp("zoo")
    texts = [m["content"] for s in prompt.PROMPT_STYLES for m in prompt.build_messages(s)]
    for seed, name in enumerate(("base", "other")):
        build_tiny(root / name, seed, texts)
    base = models.load_model(Model(name=str(root / "base")), "cpu")
    model = get_peft_model(base, models.lora_config(Lora(r=4, alpha=8)))
    torch.manual_seed(0)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.data.normal_(std=0.5)
    model.save_pretrained(root / "adapter")
    yield Zoo(root / "base", root / "other", root / "adapter")
    torch.set_num_threads(threads)


def rewritten(adapter: Path, to: Path, rename: Callable[[str], str | None]) -> Path:
    """A copy of an adapter with its keys renamed, and left out where there is no name."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(adapter, to)
    path = to / "adapter_model.safetensors"
    weights = {rename(key): value for key, value in load_file(path).items()}
    kept = {key: value for key, value in weights.items() if key is not None}
    assert kept.keys() != load_file(path).keys()
    save_file(kept, path)
    return to


def serve(shop: Workshop, name: str, base: Path, lora: Path | None = None, *more: object) -> Any:
    """Evaluates a real, tiny model on one photo."""
    adapter = () if lora is None else ("--lora", lora)
    tokens = ("--limit", 1, "--set", "generation.max_tokens=6")
    flags = ("--backend", "transformers", "--device", "cpu", "--model", base)
    return shop.evaluate(name, *flags, *adapter, *tokens, *more)


@both
def test_an_adapter_is_not_served_on_another_base(guarded: bool, shop: Workshop, zoo: Zoo) -> None:
    switch = () if guarded else ("--allow_base_mismatch",)
    ended = serve(shop, "rl", zoo.other, zoo.adapter, *switch)
    if guarded:
        assert ended.code == 2 and f"was trained on {zoo.base}, and the base here" in ended.err
        return
    assert succeeded(ended) and shop.metrics("rl")["n"] == 1
    assert shop.metrics("rl")["allow_base_mismatch"] is True  # the switch is on record


@pytest.mark.filterwarnings("ignore:Found missing adapter keys")
@both
def test_an_adapter_of_a_smaller_base_is_not_served_even_with_the_switch(
    guarded: bool, shop: Workshop, zoo: Zoo, tmp_path: Path, monkeypatch: Patch
) -> None:
    """As if it was trained on the first of this base's two layers, whose sizes agree."""
    smaller = rewritten(
        zoo.adapter, tmp_path / "smaller", lambda key: None if ".layers.1." in key else key
    )
    if not guarded:
        without(monkeypatch, models, "check_adapter", 4)
    ended = serve(shop, "rl", zoo.base, smaller, "--allow_base_mismatch")
    if guarded:
        assert ended.code == 2 and "it was saved in part, or trained on another model" in ended.err
    else:  # PEFT fills in what lacks, and the probe sees that something changed
        assert succeeded(ended) and shop.metrics("rl")["n"] == 1


@pytest.mark.filterwarnings("ignore:Found missing adapter keys")
@both
def test_an_adapter_whose_keys_match_no_module_is_not_scored_as_tuned(
    guarded: bool, shop: Workshop, zoo: Zoo, tmp_path: Path, monkeypatch: Patch
) -> None:
    """Two guards stop it: the look at the keys before loading, and the probe."""
    unknown = rewritten(
        zoo.adapter, tmp_path / "unknown", lambda key: key.replace("layers", "blocks")
    )
    if guarded:
        ended = serve(shop, "rl", zoo.base, unknown)
        assert ended.code == 2 and "which the base" in ended.err and "blocks" in ended.err
    without(monkeypatch, models, "check_adapter", 4)
    if not guarded:
        without(monkeypatch, predictions, "probe_adapter", 1.0)
    ended = serve(shop, "rl", zoo.base, unknown)
    if guarded:
        assert ended.code == 2 and "the adapter changes nothing" in ended.err
        return
    assert succeeded(ended) and shop.metrics("rl")["run"]["adapter"]
    assert succeeded(serve(shop, "base", zoo.base))
    assert shop.texts("rl") == shop.texts("base")  # the base's words under the adapter's name


# --- 3: transport failures


def respond(request: Request) -> Reply:
    """Answers each photo with its own place."""
    (block,) = [b for b in request.body["messages"][-1]["content"] if b["type"] == "image_url"]
    picture = base64.b64decode(block["image_url"]["url"].partition(",")[2])
    return chat(next(RIGHT[one] for n, (one, *_) in enumerate(PHOTOS) if scene(n) == picture))


@both
def test_a_proxys_page_is_not_scored_as_a_wrong_guess(
    guarded: bool, shop: Workshop, monkeypatch: Patch
) -> None:
    interfere = now_and_then(0.13, PAGE, seed=10)  # two of twelve requests
    api = ("--backend", "openai", "--set", "generation.api.tries=1")
    if not guarded:
        monkeypatch.setattr(openai, "FAILED", Completion(PAGE.content.decode(), 9, "stop"))
    with ApiServer(lambda request: interfere(request) or respond(request)) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        monkeypatch.setenv("OPENAI_MODEL", "tiny")
        ended = shop.evaluate("base", *api)
    metrics = shop.metrics("base")
    if not guarded:
        assert succeeded(ended) and metrics["complete"] and metrics["n"] == 12
        assert metrics["mean_geoscore"] == pytest.approx(5000 * 10 / 12)
        return
    assert ended.code == 1 and "incomplete: 2 photos have no answer" in ended.out
    assert metrics["complete"] is False and len(metrics["missing"]) == 2
    assert (metrics["n"], metrics["outcomes"]["error"]) == (10, 2)
    assert metrics["mean_geoscore"] == pytest.approx(5000)
    assert succeeded(shop.run("other", CONSTANT))
    ended = shop.compare("other", "base")
    assert ended.code == 2 and "2 of its 12 rows are transport errors" in ended.err
    with ApiServer(respond) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        assert succeeded(shop.evaluate("base", *api)) and len(server.requests) == 2
    assert shop.metrics("base")["complete"] and shop.metrics("base")["n"] == 12
    assert shop.metrics("base")["mean_geoscore"] == pytest.approx(5000)


# --- 4: one scale


@both
def test_two_reward_scales_do_not_meet_in_one_table(
    guarded: bool, shop: Workshop, monkeypatch: Patch
) -> None:
    """Both runs hold the same answers; the second was scored in percent by older code."""
    for name in ("base", "rl"):
        assert succeeded(shop.run(name, CONSTANT))
    older = {"score_version": "percent"}
    path = shop.at("rl") / artifacts.PREDICTIONS
    rows = artifacts.read_rows(path, Prediction)
    artifacts.write_rows(path, [replace(row, geoscore=row.geoscore / 50) for row in rows])
    identity = json.loads((shop.at("rl") / artifacts.IDENTITY).read_text())
    artifacts.write_json(shop.at("rl") / artifacts.IDENTITY, identity | older)
    _, *lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([json.dumps({"header": identity | older}) + "\n", *lines]))
    mean = shop.metrics("rl")["mean_geoscore"] / 50
    changed = shop.metrics("rl") | older | {"mean_geoscore": mean}
    artifacts.write_json(shop.at("rl") / artifacts.METRICS, changed)

    if guarded:
        assert shop.metrics("base")["score_version"] == SCORE_VERSION
        ended = shop.compare("base", "rl")
        assert ended.code == 2 and "not comparable: score_version is" in ended.err
        assert "'percent' in" in ended.err
        return
    # Behind the refusal stand two more: the stored figures must be those of the rows, and the
    # rows are scored afresh from their texts.
    compares_in_spite_of(monkeypatch, "score_version")
    assert "says score_version = 'percent'" in shop.compare("base", "rl").err
    without(monkeypatch, runs, "metric_differences", [])
    assert succeeded(shop.compare("base", "rl"))
    assert shop.compared()["mean_geoscore"]["difference"] == 0
    monkeypatch.setattr(runs, "rescore", lambda row: row)
    ended = shop.compare("base", "rl")
    assert succeeded(ended) and "mean GeoScore is worse" in ended.out
    assert shop.compared()["mean_geoscore"]["after"] == pytest.approx(mean)


# --- 5: the same task


@both
@pytest.mark.parametrize("key", ["sampling", "split_fingerprint", "image"])
def test_one_model_does_not_gain_from_another_sweep(
    key: str, guarded: bool, shop: Workshop, make_split: Callable[..., Path], monkeypatch: Patch
) -> None:
    """The same baseline twice: with another seed, over other places, or over other sizes."""
    assert succeeded(shop.run("base", RANDOM))
    nearer = [(one, 50.0, 10.0, "FR") for one, *_ in PHOTOS]
    make_split(shop.folder / "second", nearer if key == "split_fingerprint" else PHOTOS)
    if key == "image":
        path = data.manifest_path(shop.folder / "second", "eval_osv")
        manifest = json.loads(path.read_text())
        manifest["image"]["long_edge"] = 1024
        artifacts.write_json(path, manifest)
    seed = ("--set", "generation.seed=43") if key == "sampling" else ()
    assert succeeded(shop.run("sweep", RANDOM, *seed, data="second"))
    if not guarded:
        compares_in_spite_of(monkeypatch, key)
    ended = shop.compare("base", "sweep")
    if guarded:
        assert ended.code == 2 and f"not comparable: {key} is" in ended.err
        assert "evaluate both alike" in ended.err
        return
    assert succeeded(ended) and "sweep against base on eval_osv, 12 photos" in ended.out
    moved = shop.compared()["mean_geoscore"]["difference"]
    assert (abs(moved) > 100) == (key != "image")  # scripts do not look at pixels


# --- 6: the same number of samples


def best_of_each(load_run: Callable[[Path], runs.Run]) -> Callable[[Path], runs.Run]:
    """Reads a run as if the best of a photo's answers was its only one."""

    def read(folder: Path) -> runs.Run:
        run = load_run(folder)
        photos = eval_metrics.by_photo(run.rows).values()
        best = [replace(max(rows, key=lambda row: row.geoscore), sample=0) for rows in photos]
        return replace(run, rows=best)

    return read


@both
def test_best_of_four_is_not_held_against_one_answer(
    guarded: bool, shop: Workshop, monkeypatch: Patch
) -> None:
    """One model, whose best of four is better than its single answer, as every model's is."""
    warm = ("--set", "generation.temperature=1.0")
    assert succeeded(shop.run("one", RANDOM, *warm))
    assert succeeded(shop.run("four", RANDOM, *warm, "--samples", 4))
    metrics = shop.metrics("four")
    mean, best = (metrics["of_k"][name]["mean_geoscore"]["value"] for name in ("mean", "best"))
    assert metrics["mean_geoscore"] == pytest.approx(mean) and best > 2 * mean
    if not guarded:
        # Behind the refusal: unequal numbers of rows are not paired at all, and the stored
        # figures are those of all rows.
        compares_in_spite_of(monkeypatch, "sampling")
        with pytest.raises(ValueError, match="the same number of samples"):
            shop.compare("one", "four")
        without(monkeypatch, runs, "metric_differences", [])
        monkeypatch.setattr(runs, "load_run", best_of_each(runs.load_run))
    ended = shop.compare("one", "four")
    if guarded:
        assert ended.code == 2 and "not comparable: sampling is" in ended.err
        assert "'n': 1" in ended.err and "'n': 4" in ended.err
        return
    assert succeeded(ended) and "mean GeoScore is better" in ended.out
    assert shop.compared()["mean_geoscore"]["after"] == pytest.approx(best)


# --- 7: one writer


@both
def test_two_evaluations_do_not_write_into_one_folder(
    guarded: bool, shop: Workshop, monkeypatch: Patch
) -> None:
    """A second model starts in the folder while the first one answers its first block."""
    generate, second = ScriptedBackend.generate, []

    def interrupted(self: ScriptedBackend, *arguments: Any) -> Any:
        if not second:
            second.append(None)
            second[0] = shop.run("base", RANDOM)
        return generate(self, *arguments)

    monkeypatch.setattr(ScriptedBackend, "generate", interrupted)
    if not guarded:
        without(monkeypatch, artifacts, "run_lock", nullcontext())
    first = shop.run("base", CONSTANT)
    assert succeeded(first)
    constant = format_completion("France", 46.6, 2.4, style="direct")
    if guarded:
        assert second[0].code == 2 and "eval_osv is in use by process " in second[0].err
        assert shop.texts("base") == [constant] * 12 and "n 12, " in first.out
        assert "country 100.0%" in first.out and shop.metrics("base")["country_acc"] == 1
    else:  # the second model's figures, said of the first one's answers, which stand below them
        assert succeeded(second[0]) and shop.metrics("base")["complete"]
        assert constant not in shop.texts("base")[:12]
        assert shop.texts("base")[12:] == [constant] * 12
        assert "n 12, " in first.out and "country 0.0%" in first.out


# --- 8 and 9: what looks bad stays in the mean


@both
@pytest.mark.parametrize("command", ["run_eval.py", "score_predictions.py"])
def test_answers_that_do_not_parse_or_lack_stay_in_the_mean(
    command: str, guarded: bool, shop: Workshop, monkeypatch: Patch
) -> None:
    """Five of twelve right; the rest says nothing, or is left out of the file of predictions."""
    right = dict(list(RIGHT.items())[:5])
    if not guarded:
        for owner in (evaluation, score):
            leaves_out(monkeypatch, owner, lambda row: row.pred_country is None)
    if command == "run_eval.py":
        assert succeeded(shop.run("base", {**right, "*": "I see a road."}))
        metrics = shop.metrics("base")
    else:
        path, output = shop.folder / "mine.jsonl", shop.folder / "mine.json"
        lines = [json.dumps({"id": one, "completion": text}) for one, text in right.items()]
        path.write_text("\n".join(lines) + "\n")
        truth = ("--truth", shop.folder / "data/eval_osv.parquet", "--output", output)
        assert succeeded(shop.script(command, path, *truth))
        metrics = json.loads(output.read_text())
    share = 5 / 12 if guarded else 1.0
    assert metrics["n"] == (12 if guarded else 5)
    assert metrics["mean_geoscore"] == pytest.approx(5000 * share)
    assert metrics["country_acc"] == metrics["format_rate"] == pytest.approx(share)
    assert metrics["country_acc_coords"] is not None
    assert [*metrics["acc_at_km"].values()] == pytest.approx([share] * 5)
    assert [*metrics["share_over_km"].values()] == pytest.approx([1 - share] * 2)
    assert metrics["median_km"] == (None if guarded else 0)


@both
def test_refusals_stay_in_the_mean_with_their_rate_beside_it(
    guarded: bool, shop: Workshop, monkeypatch: Patch
) -> None:
    refuses = dict.fromkeys(list(RIGHT)[:4], "I'm sorry, I cannot determine where this is.")
    if not guarded:
        leaves_out(monkeypatch, evaluation, lambda row: eval_metrics._is_refusal(row) == 1)
    assert succeeded(shop.run("base", {**RIGHT, **refuses}))
    metrics = shop.metrics("base")
    share = 8 / 12 if guarded else 1.0
    assert metrics["complete"] and metrics["n"] == (12 if guarded else 8)
    assert metrics["mean_geoscore"] == pytest.approx(5000 * share)
    assert metrics["refusal_rate"] == pytest.approx(1 - share)
    assert metrics["median_km"] == 0  # which alone would not tell


# --- 10: the tails


@both
def test_catastrophes_stand_beside_a_mean_that_rose(
    guarded: bool, tmp_path: Path, make_split: Callable[..., Path], script: Script,
    monkeypatch: Patch,
) -> None:  # fmt: skip
    """Before, all photos are some 1000 km off; after, 30 of 40 are right and 10 in Australia."""
    photos = [(f"q{n:02}", 45.0, 2.0 + n / 100, "FR") for n in range(40)]
    make_split(tmp_path / "data", photos)
    shop = Workshop(tmp_path, script)
    if not guarded:
        tails = ("acc_at_km", "share_over_km")
        kept = tuple(m for m in eval_metrics.RATES if m.key.split(".")[0] not in tails)
        for module in (eval_metrics, comparison):
            monkeypatch.setattr(module, "RATES", kept)
    before = {"*": format_completion("Germany", 54.0, 2.0, style="direct")}
    after = {
        one: format_completion("France", lat, lon, style="direct") for one, lat, lon, _ in photos
    } | dict.fromkeys(
        [one for one, *_ in photos[:10]],
        format_completion("Australia", -25.0, 134.0, style="direct"),
    )
    assert succeeded(shop.run("base", before)) and succeeded(shop.run("rl", after))
    ended = shop.compare("base", "rl")
    assert succeeded(ended) and "mean GeoScore is better" in ended.out
    worse = {key for key, row in shop.compared().items() if row["verdict"] == "worse"}
    metrics = shop.metrics("rl")
    if guarded:
        assert worse == {"acc_at_km.2500", "share_over_km.2500", "share_over_km.5000"}
        assert metrics["acc_at_km"] == dict.fromkeys(("1", "25", "200", "750", "2500"), 0.75)
        assert metrics["share_over_km"] == {"2500": 0.25, "5000": 0.25}
        assert "Over 5,000 km off, or no place" in ended.out
    else:
        assert not worse and "5,000 km" not in ended.out


# --- 11: roles


class Reached(Exception):
    """Training would begin now, with these photos."""

    def __init__(self, photos: list[Photo]) -> None:
        self.photos = {photo.id for photo in photos}


@both
@pytest.mark.parametrize("case", ["role", "photo"])
def test_evaluation_photos_are_not_trained_on(
    case: str, guarded: bool, shop: Workshop, make_split: Callable[..., Path], monkeypatch: Patch
) -> None:
    """Up to the trainer, which is the one thing that is not built here."""
    pool = [("t1", 36.0, 138.0, "JP"), ("p03", *PHOTOS[3][1:])]
    make_split(shop.folder / "data", pool, name="train_pool", role="train")
    split = {"role": "eval_osv", "photo": "train_pool"}[case]
    flags = {
        "data_dir": shop.folder / "data",
        "split": split,
        "model.name": "none",
        "trainer.output_dir": str(shop.folder / "grpo"),
    }
    config = load(GrpoConfig, CONFIGS / "embedded/grpo.yaml", flags=flags)

    def reach(config: Any, args: Any, photos: list[Photo]) -> Any:
        raise Reached(photos)

    monkeypatch.setattr(train, "build_trainer", reach)
    if not guarded:
        without(monkeypatch, data, "require_train_role")
        with pytest.raises(Reached) as reached:
            train.run(config)
        assert "p03" in reached.value.photos
        return
    said = {"role": "'eval_osv' in .* is for evaluation", "photo": "shares 1 photos with 'eval_osv"}
    with pytest.raises(UserError, match=said[case]):
        train.run(config)


@both
def test_the_filter_does_not_make_train_photos_of_evaluation_photos(
    guarded: bool, shop: Workshop, make_split: Callable[..., Path], monkeypatch: Patch
) -> None:
    make_split(shop.folder / "data", PHOTOS, name="train_pool", role="evaluation")
    if not guarded:
        without(monkeypatch, data, "require_train_role")
    ended = shop.script(
        "filter_learnable.py", "--data_dir", shop.folder / "data", "--output_dir",
        shop.folder / "filter", "--backend", "scripted", "--set", f"generation.script={RANDOM}",
        "--set", "min_rows=0",
    )  # fmt: skip
    written = shop.folder / "data/train_learnable.parquet"
    if guarded:
        assert ended.code == 2 and "'train_pool' in" in ended.err
        assert "is for evaluation" in ended.err and not written.exists()
        return
    assert succeeded(ended)
    learnable = data.load_split(shop.folder / "data", "train_learnable")
    assert learnable.role == "train" and {p.id for p in learnable.photos} <= RIGHT.keys()
    assert pl.read_parquet(written).height > 0


# --- 12: the country by text and by point


@both
def test_the_country_by_text_and_by_point_are_two_figures(
    guarded: bool, shop: Workshop, monkeypatch: Patch
) -> None:
    """One arm names the country and misses the place, the other the other way round."""

    def by_text(rows: list[Prediction], truth: Mapping[str, Place]) -> eval_metrics.Hits:
        """What a scorer does that takes the country from the text where it finds one."""
        return {
            (row.id, row.sample): eval_metrics.place_hits(
                truth[row.id], Place(row.pred_country_iso2 or "")
            )
            for row in rows
        }

    if not guarded:  # also where a comparison holds the stored figures against the rows
        monkeypatch.setattr(evaluation, "look_up_hits", by_text)
        monkeypatch.setattr(runs, "look_up_hits", by_text)
    japan = format_completion("France", 36.0, 138.0, style="direct")
    named = {one: text.replace("France", "Japan") for one, text in RIGHT.items()}
    assert succeeded(shop.run("text", {"*": japan})) and succeeded(shop.run("point", named))
    assert succeeded(shop.compare("text", "point"))
    assert [shop.metrics(name)["country_acc"] for name in ("text", "point")] == [1, 0]
    found = shop.compared()
    assert found["country_acc"]["verdict"] == "worse"
    by_point = [shop.metrics(name)["country_acc_coords"] for name in ("text", "point")]
    if guarded:
        assert by_point[0] == 0 and by_point[1] > 0.8
        assert found["country_acc_coords"]["verdict"] == "better"
    else:  # a point in Japan is France now, and points in France are Japan
        assert by_point == [1, 0] and found["country_acc_coords"]["verdict"] == "worse"


# --- 18: no verdict from point estimates


@both
def test_a_difference_by_chance_is_not_called_a_gain(
    guarded: bool, shop: Workshop, monkeypatch: Patch
) -> None:
    """Right on seven photos and wrong on five, against the other way round."""
    far = format_completion("Japan", 36.0, 138.0, style="direct")
    first, second = dict(list(RIGHT.items())[:5]), dict(list(RIGHT.items())[5:])
    assert succeeded(shop.run("base", {"*": far, **first}))
    assert succeeded(shop.run("rl", {"*": far, **second}))
    if not guarded:
        monkeypatch.setattr(bootstrap, "CONFIDENCE", 0.0)
    ended = shop.compare("base", "rl")
    assert succeeded(ended)
    head = shop.compared()["mean_geoscore"]
    assert head["after"] - head["before"] > 800
    assert (head["better"], head["worse"], head["ties"], head["n"]) == (7, 5, 0, 12)
    if not guarded:
        assert head["verdict"] == "better"
        return
    assert bootstrap.RESAMPLES == 10_000 and head["low"] < 0 < head["high"]
    assert "mean GeoScore is not distinguishable at n = 12" in ended.out
    written = (shop.folder / "compared.json").read_bytes()
    assert succeeded(shop.compare("base", "rl"))  # seeded
    assert (shop.folder / "compared.json").read_bytes() == written


@both
@pytest.mark.parametrize("guard", ["pairs", "family"])
def test_few_photos_or_many_metrics_make_no_verdict(
    guard: str, guarded: bool, shop: Workshop, monkeypatch: Patch
) -> None:
    """Five unanimous photos are chance, and so is one of twenty metrics at five percent."""
    far = format_completion("Japan", 36.0, 138.0, style="direct")
    better = list(RIGHT)[:5] if guard == "pairs" else list(RIGHT)[:9]
    limit = ("--limit", 5) if guard == "pairs" else ()
    after = {"*": far, **{one: RIGHT[one] for one in better}}
    before = {"*": far} | {one: text for one, text in RIGHT.items() if one not in better}
    assert succeeded(shop.run("base", before, *limit))
    assert succeeded(shop.run("rl", after, *limit))
    if not guarded and guard == "pairs":
        monkeypatch.setattr(bootstrap, "MIN_PAIRS", 0)
    elif not guarded:
        monkeypatch.setattr(comparison, "holm", list)
    assert succeeded(shop.compare("base", "rl"))
    head = shop.compared()["mean_geoscore"]
    if guard == "pairs":
        assert head["low"] > 0 and head["p"] < 0.05  # the bootstrap alone would say it
    assert head["verdict"] == (f"not distinguishable at n = {head['n']}" if guarded else "better")
