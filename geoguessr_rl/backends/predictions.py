"""Photos -> scored predictions, a block at a time: what evaluation and the filter share.

Rows are written a block at a time and never generated twice, whatever kills the process; what a run
is stands beside them, so that another model or another sampling is never mixed in.
"""

import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from geoguessr_rl import artifacts, data
from geoguessr_rl.artifacts import UserError
from geoguessr_rl.backends import Backend, open_backend, probe_adapter, ray_engine
from geoguessr_rl.config import EvalConfig, FilterConfig, Generation, Model, Prompt, Ray
from geoguessr_rl.eval_metrics import make_prediction
from geoguessr_rl.records import Completion, Photo, Prediction, Sampling
from geoguessr_rl.reward import SCORE_VERSION

WAITING = "blocks"  # in a run's folder: blocks that were finished before their turn
NO_ANSWER = Completion("", 0, "error")


def sampling_of(generation: Generation, n: int) -> Sampling:
    """Returns how a phase samples `n` completions a photo."""
    return Sampling(
        n=n,
        temperature=generation.temperature,
        top_p=generation.top_p,
        max_tokens=generation.max_tokens,
        seed=generation.seed,
    )


def find_adapter(lora: Path) -> Path:
    """Returns an adapter's folder; a training run's folder means its last whole checkpoint.

    Raises:
        UserError: There is neither.
    """
    if (lora / "adapter_config.json").is_file():
        return lora
    checkpoints = artifacts.complete_checkpoints(lora)
    if not checkpoints:
        raise UserError(f"{lora} holds no adapter and no whole checkpoint; check --lora")
    return checkpoints[-1]


def check_trained_alike(
    lora: Path, style: str, image_policy: Mapping[str, Any], base: str | None = None
) -> None:
    """Refuses to measure an adapter under another prompt or photo size than it was trained on.

    Args:
        lora: The adapter's folder.
        style: The prompt style of this run.
        image_policy: The size of its photos.
        base: The base model, whose weights must be those that the adapter was trained on where both
            are in folders; None leaves that to the caller.
    """
    trained = training_record(lora)
    if trained is None:
        return
    for name, here in (("prompt_style", style), ("image", dict(image_policy))):
        if (there := trained[name]) != here:
            raise UserError(
                f"{lora} was trained with {name} {there!r}, and this run has {here!r}; "
                "use the same for both"
            )
    files, then = base and artifacts.folder_fingerprint(base), trained.get("model_files")
    if files and then and files != then:
        raise UserError(
            f"{lora} was trained on other weights than those in {base} now; name the base of "
            "that time, or pass --allow_base_mismatch"
        )


def training_record(lora: Path) -> dict[str, Any] | None:
    """Returns what `train` wrote about the run of an adapter's folder, or None beside none."""
    for folder in (lora, lora.parent):
        record = folder / artifacts.IDENTITY
        if record.is_file():
            trained = artifacts.read_json(record, remedy="train the adapter again")
            if "lora" in trained:
                return dict(trained)
    return None


def identity(
    split: data.Split, config: EvalConfig | FilterConfig, sampling: Sampling
) -> dict[str, Any]:
    """Returns everything that must be equal for two runs to be one run."""
    lora = config.lora
    return {
        **_engine(config.generation, config.model, config.data_dir),
        "adapter": artifacts.folder_fingerprint(str(lora)) if lora is not None else None,
        "prompt_style": config.prompt.style,
        "sampling": artifacts.plain(sampling),
        "split": split.name,
        "split_fingerprint": split.fingerprint,
        "image": split.image_policy,
        "block_size": config.generation.block_size,
        "score_version": SCORE_VERSION,
    }


def _engine(generation: Generation, model: Model, data_dir: Path) -> dict[str, Any]:
    """Returns what makes the answers, down to the bytes of a local model and the number format."""
    if generation.backend == "scripted":
        script = Path(generation.script)
        files = artifacts.file_sha256(script)[:16] if script.is_file() else None
        if generation.script == "train_prior":
            files = data.load_split(data_dir, "train_pool").fingerprint
        return {"backend": "scripted", "model": f"scripted:{script.name}", "model_files": files}
    if generation.backend == "openai":
        from geoguessr_rl.backends.openai import server_model

        return {"backend": "openai", "model": server_model(model), "model_files": None}

    from geoguessr_rl.backends import models

    device = models.pick_device(generation.device)
    engine = {
        "backend": generation.backend,
        "model": model.name,
        "model_files": artifacts.folder_fingerprint(model.name),
        "device": device,
        "dtype": models.pick_dtype(model.dtype, device),
    }
    # Rows that are padded together decide a transformers answer's last bits.
    padded = generation.backend == "transformers"
    return engine | ({"batch_size": generation.batch_size} if padded else {})


def generate(
    path: Path,
    photos: Sequence[Photo],
    generation: Generation,
    model: Model,
    prompt: Prompt,
    sampling: Sampling,
    *,
    data_dir: Path = Path("data"),
    header: Mapping[str, Any] | None = None,
    lora: Path | None = None,
    allow_base_mismatch: bool = False,
    engine: Callable[[], Backend] | None = None,
    ray: Ray | None = None,
) -> list[Prediction]:
    """Generates and scores completions for photos, or reads them where they are done already.

    Photos whose transport failed before are asked for again, and nothing else is. When a whole
    block fails, nobody is there to answer, and the rest is left for another run.

    Args:
        path: The JSON Lines file that holds and receives the rows.
        photos: In the split's order.
        generation: The backend and its block size.
        model: The base model.
        prompt: The prompt style.
        sampling: `n` rows a photo.
        data_dir: Where the splits are, for a baseline that goes by the train pool.
        header: The first record of the file.
        lora: An adapter's folder.
        allow_base_mismatch: See `backends.open_backend`.
        engine: Gives a backend that is open already and uses the adapter; None opens one.
        ray: The workers of a Ray cluster that answer instead; None: this process.

    Returns:
        `sampling.n` predictions a photo, in order; fewer photos when nobody answered any more.
    """
    opening = partial(
        open_backend,
        generation,
        model,
        prompt.style,
        lora=lora,
        allow_base_mismatch=allow_base_mismatch,
        data_dir=data_dir,
    )
    probed = photos[0] if lora is not None and photos else None
    backend = cache(partial(_open, engine or opening, probed))
    finish = partial(_here, backend, sampling)
    if ray:
        finish = partial(_on_ray, partial(_open, opening, probed), sampling, generation, ray)
    finished: Iterator[list[Prediction]] = iter(())
    score, answered, abandoned = 0.0, 0, False
    with tqdm(total=len(photos), unit="photo", desc=path.parent.name, mininterval=1) as bar:

        def begin(blocks: Sequence[Sequence[Photo]]) -> None:
            nonlocal finished
            finished = _in_order(path.parent / WAITING, blocks, finish)

        def work(block: Sequence[Photo]) -> list[Prediction]:
            nonlocal score, answered, abandoned
            if abandoned:
                raise _NobodyThere
            rows = next(finished)
            scores = [row.geoscore for row in rows if row.outcome != "error"]
            # Without a server, a block that nobody answers is its photos' fault.
            if abandoned := not scores and (ray is None or generation.backend == "openai"):
                why = None if ray else getattr(backend(), "last_failure", None)
                bar.write(f"nobody answered a whole block ({why}); stopping", file=sys.stderr)
            score, answered = score + sum(scores), answered + len(scores)
            bar.update(len(block))
            bar.set_postfix(geoscore=f"{score / max(answered, 1):.0f}")
            return rows

        with suppress(_NobodyThere):
            _retry_errors(path, photos, generation.block_size, begin, work)
            done = artifacts.run_blocks(
                path, photos, generation.block_size, sampling.n, work, begin=begin, header=header
            )
            bar.update(done)
            shutil.rmtree(path.parent / WAITING, ignore_errors=True)
    rows = artifacts.read_rows(path, Prediction)[: len(photos) * sampling.n]
    expected = [photo.id for photo in photos for _ in range(sampling.n)]
    if [row.id for row in rows] != expected[: len(rows)]:
        raise UserError(f"{path} holds rows of other photos; delete its folder and run again")
    return rows


def _open(opening: Callable[[], Backend], probed: Photo | None) -> Backend:
    """Opens a backend, and checks its adapter on `probed`, which is None without one."""
    backend = opening()
    if probed is not None:
        probe_adapter(backend, probed)
    return backend


def start_answering(
    opening: Callable[[], Backend], sampling: Sampling
) -> Callable[[Sequence[Photo]], list[Prediction]]:
    """Opens a backend and returns what answers a block with it; a Ray worker begins with this."""
    return partial(_answer, opening(), sampling)


def _answer(backend: Backend, sampling: Sampling, block: Sequence[Photo]) -> list[Prediction]:
    """Returns a block's scored completions, `sampling.n` a photo, in order."""
    return [
        make_prediction(
            photo.id, k, photo.latitude, photo.longitude, photo.country_iso2, completion
        )
        for photo, completions in zip(block, backend.generate(block, sampling), strict=True)
        for k, completion in enumerate(completions)
    ]


Finish = Callable[[Mapping[int, Sequence[Photo]]], Iterator[tuple[int, list[Prediction]]]]
"""Answers numbered blocks, and yields each one's number and rows when it is done."""


def _here(
    backend: Callable[[], Backend], sampling: Sampling, blocks: Mapping[int, Sequence[Photo]]
) -> Iterator[tuple[int, list[Prediction]]]:
    """Answers blocks in this process, one after the other."""
    for number, block in blocks.items():
        yield number, _answer(backend(), sampling, block)


def _on_ray(
    opening: Callable[[], Backend],
    sampling: Sampling,
    generation: Generation,
    section: Ray,
    blocks: Mapping[int, Sequence[Photo]],
) -> Iterator[tuple[int, list[Prediction]]]:
    """Answers blocks on a Ray cluster; a photo that kills its worker has an error for an answer."""

    def lost(photo: Photo) -> list[Prediction]:
        place = (photo.latitude, photo.longitude, photo.country_iso2)
        return [make_prediction(photo.id, k, *place, NO_ANSWER) for k in range(sampling.n)]

    if generation.backend == "openai" and section.workers is None:
        section = section.model_copy(update={"workers": 1})  # the pace it may ask in is one's own
    gpu = generation.backend in ("vllm", "transformers") and generation.device != "cpu"
    start, numbers = partial(start_answering, opening, sampling), [*blocks]
    for n, rows in ray_engine.map_blocks(start, [*blocks.values()], lost, section, gpu=gpu):
        yield numbers[n], rows


def _in_order(
    folder: Path, blocks: Sequence[Sequence[Photo]], finish: Finish
) -> Iterator[list[Prediction]]:
    """Yields each block's rows in the order of the blocks.

    One that is finished before its turn waits in a file of its own in `folder`, so that a kill does
    not lose it; what a killed run has left there is taken first.
    """
    files = [folder / f"{artifacts.fingerprint([p.id for p in block])}.jsonl" for block in blocks]
    waiting = {number for number, file in enumerate(files) if _holds_answers(file)}
    finished = finish({n: block for n, block in enumerate(blocks) if n not in waiting})
    for turn, file in enumerate(files):
        rows = None
        while rows is None and turn not in waiting:
            number, answers = next(finished)
            if number == turn:
                rows = answers
            else:
                artifacts.write_rows(files[number], answers)
                waiting.add(number)
        if rows is None:
            rows = artifacts.read_rows(file, Prediction)
        yield rows
        file.unlink(missing_ok=True)


def _holds_answers(file: Path) -> bool:
    """Whether a block waits in a file, and all of it was answered."""
    return file.is_file() and all(
        row.outcome != "error" for row in artifacts.read_rows(file, Prediction)
    )


def holds_work(out: Path) -> bool:
    """Whether a run's folder holds answers, in its file or in blocks that wait for their turn."""
    return artifacts.holds_rows(out / artifacts.PREDICTIONS) or any((out / WAITING).glob("*.jsonl"))


class _NobodyThere(Exception):
    """A whole block of requests failed, so the next one would too."""


def _retry_errors(
    path: Path,
    photos: Sequence[Photo],
    size: int,
    begin: Callable[[Sequence[Sequence[Photo]]], None],
    work: Callable[[Sequence[Photo]], list[Prediction]],
) -> None:
    """Asks again for the photos whose rows are transport errors, and puts the answers in place."""
    rows = artifacts.read_rows(path, Prediction)
    failed = {row.id for row in rows if row.outcome == "error"}
    blocks = artifacts.blocks([photo for photo in photos if photo.id in failed], size)
    begin(blocks)
    for block in blocks:
        fresh = {(row.id, row.sample): row for row in work(block)}
        rows = [fresh.get((row.id, row.sample), row) for row in rows]
        artifacts.write_rows(path, rows)
