"""Blocks of work on the workers of a Ray cluster: `--engine ray`.

Ray Data streams the blocks through a pool of actors, each of which holds one backend, and takes up
no more of them than the workers can hold. Blocks are cut and results are written where the local
engine does it, so that both give the same files. What this file does not cover: what a block holds
and where its results go.

A block whose worker dies is tried again, wherever there is room, and after `TRIES` its items are
tried one by one, so that one photo that kills its worker costs that photo alone.
"""

import gc
import logging
import math
import os
import pickle
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from geoguessr_rl import artifacts
from geoguessr_rl.artifacts import UserError
from geoguessr_rl.config import Ray

T = TypeVar("T")
R = TypeVar("R")

Work = Callable[[Sequence[T]], Sequence[R]]

TRIES = 3  # of a block, and then of each of its items alone
MOST_LOST = 16
"""Blocks that one pass may lose; more say that the cluster is at fault and no photo."""
WINDOW = 4096  # blocks that are handed to Ray at once, so that a long list stays out of its store
STORE_BYTES = 1_000_000_000  # a local cluster's object store; results wait there to be written

# What decides an answer or says where a server is, from the driver's environment.
PASSED_ON = ("OMP_NUM_THREADS", "OPENAI_BASE_URL", "OPENAI_API_KEY", "OPENAI_MODEL")


@contextmanager
def session(engine: str, section: Ray) -> Iterator[None]:
    """Holds a Ray cluster for a phase, where `engine` asks for one.

    A local cluster ends with the block; one that was there is only left.

    Args:
        engine: `local`, for which nothing happens, or `ray`.
        section: Which cluster.

    Raises:
        UserError: Ray is not installed, or there is no cluster at the address.
    """
    if engine == "local":
        yield
        return
    # Ray reads these when it is imported.
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    os.environ.setdefault("RAY_task_oom_retries", str(TRIES - 1))  # else for ever
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise UserError(
            f"--engine ray needs Ray ({error}); install it with uv pip install -e '.[ray]'"
        ) from None
    mine = not ray.is_initialized()
    if mine:
        _connect(section)
    # A kept record of an error would keep the handle of the actor that died, see `_stream`.
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        if mine:
            ray.shutdown()


def _connect(section: Ray) -> None:
    """Starts a local cluster, or connects to the one at the address."""
    import ray

    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if section.address is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        wanted = math.ceil((section.workers or 0) * section.num_cpus)
        ray.init(
            address="local",  # without it Ray takes whatever cluster runs on this machine
            num_cpus=max(cores or 1, wanted),
            include_dashboard=False,
            object_store_memory=STORE_BYTES,
            **quiet,
        )
        return
    if section.address.startswith("ray://"):
        raise UserError(
            f"ray.address {section.address} is Ray Client's, through which Ray Data does not work; "
            "run this command on a node of the cluster with ray.address auto, or submit it there "
            "with ray job submit"
        )
    try:
        ray.init(address=section.address, **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"there is no Ray cluster to join at ray.address {section.address} ({reason}); start "
            "one with ray start --head, or leave ray.address out"
        ) from None


def map_blocks(
    start: Callable[[], Work[T, R]],
    blocks: Sequence[Sequence[T]],
    lost: Callable[[T], Sequence[R]],
    section: Ray,
    *,
    gpu: bool = False,
) -> Iterator[tuple[int, list[R]]]:
    """Yields each block's number and results, in the order in which workers finish them.

    Args:
        start: Runs once in each worker and returns what turns a block into results, equally many
            for each item and in order. It is pickled.
        blocks: The work.
        lost: Returns the results of an item that kills its worker.
        section: How many workers, and what each takes.
        gpu: Whether a worker takes a GPU where the cluster has any.

    Raises:
        UserError: A worker raised it, or workers die of every item of a block.
        Exception: A worker raised it; nothing that is raised is tried again.
    """
    for window in artifacts.blocks(range(len(blocks)), WINDOW):
        pending = {number: blocks[number] for number in window}
        while pending:
            finished, fault = 0, None
            for number, results, fault in _stream(start, pending, section, gpu, MOST_LOST):
                if fault is None:
                    yield number, results
                    del pending[number]
                    finished += 1
            if fault is not None and finished:
                continue  # the cluster lost more than a few blocks; the next pass may do better
            # Whatever Ray has given up after its tries, or the first block where nothing went well.
            for number in [*pending][: None if fault is None else 1]:
                yield number, _one_by_one(start, pending.pop(number), lost, section, gpu)


def ready(work: Work[T, R]) -> Work[T, R]:
    """Returns `work`: with `partial`, the `start` of a worker that has nothing to load."""
    return work


def _one_by_one(
    start: Callable[[], Work[T, R]],
    block: Sequence[T],
    lost: Callable[[T], Sequence[R]],
    section: Ray,
    gpu: bool,
) -> list[R]:
    """Returns the results of a block that cost its workers, each item tried alone."""
    alone = {number: [item] for number, item in enumerate(block)}
    done: dict[int, list[R]] = {}
    fault = None
    for number, results, fault in _stream(start, alone, section, gpu, -1):
        if fault is None:
            done[number] = results
    if not done and (len(block) > 1 or fault):
        names = [getattr(item, "path", item) for item in (block[0], block[-1])]
        raise UserError(
            f"the block from {names[0]} to {names[1]} lost its worker {TRIES} times, and so did "
            f"each of its photos alone{f' ({fault})' if fault else ''}; check the memory and the "
            "logs of the cluster, and run the same command again"
        )
    return [
        result for number, item in enumerate(block) for result in done.get(number) or lost(item)
    ]


def _stream(
    start: Callable[[], Work[T, R]],
    pending: Mapping[int, Sequence[T]],
    section: Ray,
    gpu: bool,
    most_lost: int,
) -> Iterator[tuple[int, list[R], str | None]]:
    """Yields (number, results, None) as blocks finish, and last (-1, [], fault) if Ray gave up.

    A block whose worker died `TRIES` times is left out.
    """
    import ray
    from ray.data import ActorPoolStrategy, DataContext

    context = DataContext.get_current()
    context.enable_progress_bars = context.print_on_execution_start = False
    context.max_errored_blocks = most_lost
    gpus = ray.cluster_resources().get("GPU", 0) if gpu else 0
    num_gpus = section.num_gpus if section.num_gpus is not None else float(gpus > 0)
    rows = [{"number": number, "job": pickle.dumps(block)} for number, block in pending.items()]
    jobs = ray.data.from_items(rows, override_num_blocks=len(rows))
    environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    workers = min(_workers(section, num_gpus), len(pending))
    with warnings.catch_warnings(action="ignore"):  # 2.60 deprecates the last one and has no other
        finished = jobs.map_batches(
            _Worker,
            fn_constructor_args=(pickle.dumps((start, os.getcwd(), environment)),),
            batch_size=1,  # one job; with GPUs Ray wants a number
            batch_format="pyarrow",
            # One task a worker: a photo that kills its worker takes no other block with it.
            compute=ActorPoolStrategy(size=workers, max_tasks_in_flight_per_actor=1),
            num_cpus=section.num_cpus,
            num_gpus=num_gpus or None,
            ray_remote_args_fn=lambda: {"max_restarts": -1, "max_task_retries": TRIES - 1},
        )
    try:
        for table in finished.iter_batches(batch_size=None, batch_format="pyarrow"):
            for row in table.to_pylist():  # type: ignore[union-attr]
                results, error = pickle.loads(row["outcome"])
                if error is not None:
                    raise error
                yield row["number"], results, None
    except ray.exceptions.RayError as error:
        yield -1, [], str(error).strip().splitlines()[0]
    finally:
        # A traceback holds the handle of an actor that died, and so the actor that replaced it: it
        # would keep its core or GPU from the next pass.
        del finished, jobs
        gc.collect()


def _workers(section: Ray, num_gpus: float) -> int:
    """Returns how many workers there are: one a GPU, on a CPU one a core."""
    import ray

    if section.workers is not None:
        return section.workers
    there = ray.cluster_resources()
    if num_gpus:
        return max(1, int(there.get("GPU", 0) / num_gpus))
    return max(1, int(there.get("CPU", 1) / section.num_cpus)) if section.num_cpus else 1


class _Worker:
    """What one actor does: it starts once, and then turns blocks into results.

    Errors come back as values: Ray would wrap them, try them again, or leave their blocks out.
    """

    def __init__(self, setup: bytes) -> None:
        """Takes the pickled start, folder and environment; nothing is loaded yet."""
        self._setup: bytes = setup
        self._work: Work[Any, Any] | None = None

    def __call__(self, jobs: Any) -> Any:
        """Maps an Arrow table of one job to a table of its outcome."""
        import pyarrow as pa  # type: ignore[import-untyped]

        (job,) = jobs["job"].to_pylist()
        outcome = pickle.dumps(self._outcome(job))
        return pa.table(
            {"number": jobs["number"], "outcome": pa.array([outcome], pa.large_binary())}
        )

    def _outcome(self, job: bytes) -> tuple[list[Any], Exception | None]:
        """Returns a block's results, or none and the error that the driver raises."""
        try:
            if self._work is None:
                self._work = self._start()
            return list(self._work(pickle.loads(job))), None
        except Exception as error:
            if not isinstance(error, UserError):
                error.add_note(f"in a Ray worker:\n{traceback.format_exc()}")
            with suppress(Exception):
                pickle.loads(pickle.dumps(error))
                return [], error
            return [], RuntimeError(f"a Ray worker raised\n{traceback.format_exc()}")

    def _start(self) -> Work[Any, Any]:
        """Brings this process where the driver is: paths in a config may be relative."""
        start, folder, environment = pickle.loads(self._setup)
        os.environ.update(environment)
        try:
            os.chdir(folder)
        except OSError as error:
            raise UserError(
                f"{folder} cannot be entered on {os.uname().nodename} ({error.strerror}); "
                "every node must see the same folders"
            ) from None
        return start()
