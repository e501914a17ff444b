"""One request: claim room, send the ids, wait for the dump. HTTP is only the trigger; no state comes back with it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from hs_assets.errors import ServerDiedError, SpoolError, WireError
from hs_assets.samples.prompts import Prompt
from hs_assets.serving.admission import Admission
from hs_assets.serving.server import require_up
from hs_assets.serving.state import ServerFolder, ServerState
from hs_assets.wire.dump import DumpLayout
from hs_assets.wire.records import AnswerRecord, CommitRecord, FailureRecord
from hs_assets.wire.rid import new_rid
from hs_assets.wire.spool import DumpFiles, Spool

TOP_LOGPROBS = 20
_POLL_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """How requests are sent; seconds."""

    max_in_flight: int
    request_seconds: float
    commit_seconds: float


@dataclass(frozen=True, slots=True)
class Captured:
    """A prompt whose dump is committed."""

    prompt: Prompt
    files: DumpFiles


@dataclass(frozen=True, slots=True)
class Failed:
    """A prompt that was not captured: a name for the ledger, and a sentence."""

    prompt: Prompt
    reason: str
    detail: str


class CaptureClient:
    """Sends the prompts of a run; use as a context manager.

    Arguments:
        layout: of a dump of one token, from which the sizes of all follow.
        say: is told when requests wait for room in the spool.
    """

    def __init__(
        self, folder: ServerFolder, state: ServerState, layout: DumpLayout, settings: ClientSettings, say: Callable[[str], None]
    ) -> None:
        self._folder = folder
        self._state = state
        self._layout = layout
        self._settings = settings
        self._spool = Spool(Path(state.spool))
        self._http = httpx.Client(
            timeout=settings.request_seconds,
            limits=httpx.Limits(max_connections=settings.max_in_flight),
            trust_env=False,
        )
        self._pool = ThreadPoolExecutor(settings.max_in_flight, thread_name_prefix="hs-assets-request")
        self._give_up = threading.Event()
        self.admission = Admission(self._spool, state.spool_bytes, say)

    @property
    def spool_bytes(self) -> int:
        """The budget of the spool."""
        return self._state.spool_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._give_up.set()
        self._http.close()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def capture(self, partition: str, prompts: Sequence[Prompt]) -> Iterator[Captured | Failed | None]:
        """Capture prompts, many at once, and give each outcome as it comes; None where nothing came for a second.

        Raises:
            ServerDiedError: the server went away, and all that it captured before was given.
        """
        pending: set[Future[Captured | Failed]] = {self._pool.submit(self._one, partition, prompt) for prompt in prompts}
        died: ServerDiedError | None = None
        while pending:
            done, pending = wait(pending, timeout=1, return_when=FIRST_COMPLETED)
            if not done:
                yield None
            for future in done:
                try:
                    yield future.result()
                except ServerDiedError as error:
                    died = died or error
                    pending = {other for other in pending if not other.cancel()}
        if died is not None:
            raise died

    def _one(self, partition: str, prompt: Prompt) -> Captured | Failed:
        rid = new_rid(partition, prompt.row, len(prompt.input_ids))
        files = self._spool.dump(str(rid))
        size = DumpLayout(rid.length, self._layout.residual_ids, self._layout.hidden_size, self._layout.dtype).file_bytes
        try:
            self.admission.claim(files, size, self._give_up)
        except SpoolError as error:
            return Failed(prompt, "larger_than_spool" if size > self._state.spool_bytes else "given_up", str(error))
        outcome = None
        try:
            outcome = self._send(prompt, files)
        finally:
            if not isinstance(outcome, Captured):
                files.free()
        return outcome

    def _send(self, prompt: Prompt, files: DumpFiles) -> Captured | Failed:
        try:
            answer = ask(self._http, self._state.url, files.rid, prompt.input_ids.tolist())
            outcome = wait_for_commit(files, self._settings.commit_seconds)
        except httpx.HTTPStatusError as error:
            return Failed(prompt, "server_error", f"HTTP {error.response.status_code}: {error.response.text[:300]}")
        except (KeyError, TypeError, ValueError) as error:
            return Failed(prompt, "bad_answer", f"the server's answer is not as expected: {error!r}")
        except httpx.TimeoutException as error:
            return Failed(prompt, "timeout", f"no answer within {self._settings.request_seconds:.0f} s: {error!r}")
        except httpx.HTTPError as error:
            self._check_server(error)
            return Failed(prompt, "connection_lost", repr(error))
        except WireError as error:
            self._check_server(error)
            return Failed(prompt, "no_dump", str(error))
        if isinstance(outcome, FailureRecord):
            return Failed(prompt, outcome.reason, outcome.detail)
        answer.write(files.answer)
        return Captured(prompt, files)

    def _check_server(self, error: Exception) -> None:
        """Raise ServerDiedError if that is why a request broke; a watchdog takes a moment to notice."""
        deadline = time.monotonic() + 3
        while time.monotonic() < deadline and not self._give_up.is_set():
            try:
                require_up(self._folder, self._state.server)
            except ServerDiedError as died:
                raise died from error
            time.sleep(0.2)


def ask(http: httpx.Client, url: str, rid: str, input_ids: list[int]) -> AnswerRecord:
    """Have the server prefill a prompt; returns what it says of the likeliest next tokens.

    Raises:
        httpx.HTTPError: it does not answer, or refuses.
    """
    response = http.post(
        f"{url}/generate",
        json={
            "rid": rid,
            "input_ids": input_ids,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "return_logprob": True,
            "top_logprobs_num": TOP_LOGPROBS,
        },
    )
    response.raise_for_status()
    info: dict[str, Any] = response.json()["meta_info"]
    top = (info["output_top_logprobs"] or [()])[0]
    return AnswerRecord(
        rid=rid,
        prompt_tokens=info["prompt_tokens"],
        cached_tokens=info["cached_tokens"],
        top_logprobs=tuple((float(logprob), int(token)) for logprob, token, _ in top),
    )


def wait_for_commit(files: DumpFiles, seconds: float) -> CommitRecord | FailureRecord:
    """What the server says of a dump; it may come a little after the HTTP answer.

    Raises:
        WireError: nothing came in time.
    """
    deadline = time.monotonic() + seconds
    while True:
        if files.commit.exists():
            return CommitRecord.read(files.commit)
        if files.failure.exists():
            return FailureRecord.read(files.failure)
        if time.monotonic() > deadline:
            raise WireError(
                "the server answered, but left no dump",
                where=files.rid,
                expected=f"a commit record within {seconds:.0f} s",
                remedy="see the server's log",
            )
        time.sleep(_POLL_SECONDS)
