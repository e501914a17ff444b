"""Ask the server for answers: token ids in, token ids out. The capture plugin sees that these requests are none of its."""

from __future__ import annotations

import secrets
import threading
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import httpx

from hs_assets.errors import HsAssetsError
from hs_assets.samples.answers import Generation
from hs_assets.serving.liveness import why_gone
from hs_assets.serving.state import ServerFolder, ServerState

_NOTICE_SECONDS = 3.0


class AnswerFailedError(HsAssetsError):
    """One request came to nothing; ``reason`` is its name for the ledger."""

    def __init__(self, reason: str, detail: str) -> None:
        self.reason = reason
        super().__init__(detail)


class GenerateClient:
    """Asks one server; use as a context manager. Threads may share it: `give_up` ends what they wait for."""

    def __init__(self, folder: ServerFolder, state: ServerState, connections: int, request_seconds: float) -> None:
        self.connections = connections
        self._folder = folder
        self._state = state
        self._seconds = request_seconds
        limits = httpx.Limits(max_connections=connections)
        self._http = httpx.Client(timeout=request_seconds, limits=limits, trust_env=False)
        self._asked: set[str] = set()
        self._gave_up = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._http.close()

    def give_up(self) -> None:
        """Have the server end the requests that are in flight, and ask nothing any more."""
        self._gave_up.set()
        with suppress(httpx.HTTPError):
            for rid in list(self._asked):
                httpx.post(f"{self._state.url}/abort_request", json={"rid": rid}, timeout=_NOTICE_SECONDS, trust_env=False)

    def ask(self, name: str, input_ids: list[int], parameters: dict[str, Any]) -> Generation:
        """What the model generates after `input_ids`.

        Arguments:
            name: of the turn, for the server's log.
            parameters: how it is drawn, as ``/generate`` takes them.

        Raises:
            AnswerFailedError: it does not answer this one.
            ServerDiedError: it is gone.
        """
        if self._gave_up.is_set():
            raise AnswerFailedError("not_answered", "it was not reached")
        rid = response_rid(name)
        self._asked.add(rid)
        try:
            body = {"rid": rid, "input_ids": input_ids, "sampling_params": parameters}
            response = self._http.post(f"{self._state.url}/generate", json=body)
            response.raise_for_status()
            return self._read(response.json())
        except httpx.HTTPStatusError as error:
            detail = f"HTTP {error.response.status_code}: {error.response.text[:300]}"
            raise AnswerFailedError("server_error", detail) from error
        except httpx.TimeoutException as error:
            raise AnswerFailedError("timeout", f"no answer within {self._seconds:.0f} s: {error!r}") from error
        except httpx.HTTPError as error:
            died = why_gone(self._folder, self._state.server, _NOTICE_SECONDS, self._gave_up)
            raise died or AnswerFailedError("connection_lost", repr(error)) from error
        except (KeyError, TypeError, ValueError) as error:
            detail = f"the server's answer is not as expected: {error!r}"
            raise AnswerFailedError("bad_answer", detail) from error
        finally:
            self._asked.discard(rid)

    def _read(self, body: dict[str, Any]) -> Generation:
        finish, ids = body["meta_info"]["finish_reason"], tuple(int(i) for i in body["output_ids"])
        if finish["type"] not in ("stop", "length"):
            raise AnswerFailedError("aborted", f"the server ended it: {finish}")
        return Generation(ids, finish["type"], self._state.server)


def response_rid(name: str) -> str:
    """A request id with a fresh nonce, which no capture takes for one of its own."""
    return f"response.{secrets.token_hex(4)}.{name}"
