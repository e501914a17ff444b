"""One request: claim room, send the ids, wait for the dump. HTTP is only the trigger; no state comes back with it."""

from __future__ import annotations

import dataclasses
import errno
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from hs_assets.errors import ServerDiedError, SpoolError
from hs_assets.samples.prompts import Prompt
from hs_assets.serving.admission import Admission
from hs_assets.serving.liveness import why_gone
from hs_assets.serving.state import ServerFolder, ServerState
from hs_assets.wire.dump import DumpLayout
from hs_assets.wire.records import AnswerRecord, FailureRecord
from hs_assets.wire.rid import new_rid
from hs_assets.wire.spool import DumpFiles, Spool

TOP_LOGPROBS = 20
_AHEAD = 2
"""Prompts that have room and wait for a thread that sends."""
_POLL_SECONDS = 0.005
_IDLE_SECONDS = 1.0
_NOTICE_SECONDS = 3.0
_TOLD_CHARACTERS = 500


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


@dataclass(frozen=True, slots=True)
class _Reply:
    """What came of a request: an answer, then its dump is still to come; a failure; or nothing, where it was not even sent."""

    prompt: Prompt
    files: DumpFiles
    result: AnswerRecord | Failed | ServerDiedError | None
    at: float


class CaptureClient:
    """Sends the prompts of a run; use as a context manager.

    One thread claims room for one prompt after another, a little ahead; ``max_in_flight`` threads send them, each as soon as
    it has the answer to its last. Whoever takes the outcomes waits for the dumps, so that no request is held back until
    another is written.

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
        self._ready: queue.Queue[tuple[Prompt, DumpFiles] | None] = queue.Queue(_AHEAD)
        self._replies: queue.SimpleQueue[_Reply] = queue.SimpleQueue()
        self._open: dict[str, DumpFiles] = {}
        self._asked: set[str] = set()
        self._threads: list[threading.Thread] = []
        self._give_up = threading.Event()
        self._looked = 0.0
        self.admission = Admission(self._spool, state.spool_bytes, state.backlog_bytes, say, settings.request_seconds)

    @property
    def spool_bytes(self) -> int:
        """The budget of the spool."""
        return self._state.spool_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._give_up.set()
        self._abort()
        self._http.close()
        for thread in self._threads:
            thread.join()
        for files in self._open.values():
            files.free()

    def capture(self, partition: str, prompts: Sequence[Prompt]) -> Iterator[Captured | Failed | None]:
        """Capture prompts, many at once, and give each outcome as it comes; None where nothing came for a second. Once only.

        Raises:
            ServerDiedError: the server went away, and all that it captured before was given.
        """
        self._threads = [threading.Thread(target=self._feed, args=(partition, prompts), name="hs-assets-feeder")]
        self._threads += [
            threading.Thread(target=self._send, name=f"hs-assets-request-{number}")
            for number in range(self._settings.max_in_flight)
        ]
        for thread in self._threads:
            thread.start()
        waiting: list[_Reply] = []
        died: ServerDiedError | None = None
        left, gave = len(prompts), time.monotonic()
        while left:
            if (reply := self._next_reply(_POLL_SECONDS if waiting else _IDLE_SECONDS)) is not None:
                waiting.append(reply)
            for one in list(waiting):
                outcome = self._outcome(one, died)
                if outcome is None:
                    continue
                waiting.remove(one)
                left -= 1
                if isinstance(outcome, ServerDiedError):
                    died = died or outcome
                    self._give_up.set()
                if isinstance(outcome, Captured):
                    self._open.pop(one.files.rid)
                elif self._open.pop(one.files.rid, None) is not None:
                    one.files.free()
                if isinstance(outcome, Captured | Failed):
                    yield outcome
                    gave = time.monotonic()
            if time.monotonic() - gave > _IDLE_SECONDS:
                yield None
                gave = time.monotonic()
                if died is None and not waiting and (died := self._why_gone(0)) is not None:
                    self._give_up.set()  # also where all wait for room, and nobody asks the server
        if died is not None:
            raise died

    def _feed(self, partition: str, prompts: Sequence[Prompt]) -> None:
        """Claim room for all prompts in their order, and hand them to the threads that send; runs in its own thread."""
        for prompt in prompts:
            rid = new_rid(partition, prompt.row, len(prompt.input_ids))
            files, layout = self._spool.dump(str(rid)), dataclasses.replace(self._layout, tokens=rid.length)
            self._open[files.rid] = files
            try:
                self.admission.claim(files, layout.file_bytes, self._give_up)
            except SpoolError as error:
                reason = "larger_than_spool" if layout.file_bytes > self._state.spool_bytes else "spool_full"
                result = None if self._give_up.is_set() else Failed(prompt, reason, str(error))
                self._replies.put(_Reply(prompt, files, result, 0))
            except Exception as error:  # whatever it is, it is this prompt's failure, and the thread goes on
                self._replies.put(_Reply(prompt, files, Failed(prompt, _reason(error), repr(error)), 0))
            else:
                self._ready.put((prompt, files))
        for _ in range(self._settings.max_in_flight):
            self._ready.put(None)

    def _send(self) -> None:
        """One request after another, each up to its HTTP answer; runs in each of the threads that send."""
        while (job := self._ready.get()) is not None:
            prompt, files = job
            try:
                result = None if self._give_up.is_set() else self._ask(prompt, files)
                if isinstance(result, AnswerRecord):
                    result.write(files.answer)
            except Exception as error:  # whatever it is, it is this prompt's failure, and the thread goes on
                result = Failed(prompt, _reason(error), repr(error))
            self._replies.put(_Reply(prompt, files, result, time.monotonic()))

    def _ask(self, prompt: Prompt, files: DumpFiles) -> AnswerRecord | Failed | ServerDiedError:
        self._asked.add(files.rid)
        try:
            answer = ask(self._http, self._state.url, files.rid, prompt.input_ids.tolist())
        except httpx.HTTPStatusError as error:
            return Failed(prompt, "server_error", f"HTTP {error.response.status_code}: {error.response.text[:300]}")
        except (KeyError, TypeError, ValueError) as error:
            return Failed(prompt, "bad_answer", f"the server's answer is not as expected: {error!r}")
        except httpx.TimeoutException as error:
            return Failed(prompt, "timeout", f"no answer within {self._settings.request_seconds:.0f} s: {error!r}")
        except httpx.HTTPError as error:
            return self._why_gone(_NOTICE_SECONDS) or Failed(prompt, "connection_lost", repr(error))
        finally:
            self._asked.remove(files.rid)
        return answer

    def _abort(self) -> None:
        """Have the server end the requests that nobody waits for any more; closing a connection would not end the wait."""
        with suppress(httpx.HTTPError):
            for rid in list(self._asked):
                httpx.post(f"{self._state.url}/abort_request", json={"rid": rid}, timeout=_NOTICE_SECONDS, trust_env=False)

    def _next_reply(self, seconds: float) -> _Reply | None:
        with suppress(queue.Empty):
            return self._replies.get(timeout=seconds)
        return None

    def _outcome(self, reply: _Reply, died: ServerDiedError | None) -> Captured | Failed | ServerDiedError | None:
        """What became of a request; None as long as its dump is to come."""
        if not isinstance(reply.result, AnswerRecord):
            return reply.result or died or ServerDiedError("the run was given up")
        files, late = reply.files, time.monotonic() - reply.at
        if files.commit.exists():
            return Captured(reply.prompt, files)
        if files.failure.exists():
            failure = FailureRecord.read(files.failure)
            return Failed(reply.prompt, failure.reason, failure.detail)
        if late > self._settings.commit_seconds:
            detail = f"the server answered, but left no dump within {self._settings.commit_seconds:.0f} s: see its log"
            return self._why_gone(0) or Failed(reply.prompt, "no_dump", detail)
        if late > _IDLE_SECONDS and (died or time.monotonic() - self._looked > _IDLE_SECONDS):
            self._looked = time.monotonic()
            return died or self._why_gone(0)
        return None

    def _why_gone(self, seconds: float) -> ServerDiedError | None:
        return why_gone(self._folder, self._state.server, seconds, self._give_up)


def _reason(error: Exception) -> str:
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return "spool_full" if full else "client_error"


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
    if response.is_error:
        raise httpx.HTTPStatusError(
            f"{response.status_code}: {response.text[:_TOLD_CHARACTERS]}", request=response.request, response=response
        )
    info: dict[str, Any] = response.json()["meta_info"]
    top = (info["output_top_logprobs"] or [()])[0]
    return AnswerRecord(
        rid=rid,
        prompt_tokens=info["prompt_tokens"],
        cached_tokens=info["cached_tokens"],
        top_logprobs=tuple((float(logprob), int(token)) for logprob, token, _ in top),
    )
