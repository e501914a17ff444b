"""The exception tree. Every error says where it happened, what was expected, what was got, and what to do about it.

HsAssetsError
├── ConfigError            the configuration cannot be used
├── WireError              a file in the spool is not what the contract says
├── RefusedError           the capture plugin will not run on this server
├── ServerError            the server cannot be used
│   ├── ServerStartError   it did not come up (carries the tail of its log)
│   ├── ServerDiedError    it went away under us (carries the tail of its log)
│   └── HandshakeError     it came up, but is not what was asked for
├── SpoolError             the spool cannot hold what is asked
├── EngineError            the CPU engine's environment cannot be made or used
├── PromptError            a source or tokenizer cannot be used
├── StoreError             the store does not hold what it should
│   └── StoreVersionError  it was written by a newer version
├── ExportError            samples cannot be exported as asked
└── ExtractionError        a partition could not be completed
    └── SpecChangedError   the configuration is not the one recorded by `layer_set`
"""

from __future__ import annotations


class HsAssetsError(Exception):
    """Base of all errors raised on purpose.

    Arguments:
        problem: one sentence that names what is wrong.
        where: file, field, row or process that it concerns.
        expected: what would have been right.
        got: what was there.
        remedy: what the reader can do now.
    """

    def __init__(
        self,
        problem: str,
        *,
        where: object = None,
        expected: object = None,
        got: object = None,
        remedy: str | None = None,
    ) -> None:
        self.problem = problem
        self.where = where
        self.expected = expected
        self.got = got
        self.remedy = remedy
        parts = [problem]
        for label, value in (("where", where), ("expected", expected), ("got", got), ("remedy", remedy)):
            if value is not None:
                parts.append(f"  {label}: {value}")
        super().__init__("\n".join(parts))


class ConfigError(HsAssetsError):
    """The configuration cannot be used."""


class WireError(HsAssetsError):
    """A file in the spool is not what the contract in ``wire/README.md`` says."""


class RefusedError(HsAssetsError):
    """The capture plugin will not run on this server."""


class ServerError(HsAssetsError):
    """The server cannot be used."""


class ServerStartError(ServerError):
    """The server did not come up."""


class ServerDiedError(ServerError):
    """The server went away while it was in use."""


class HandshakeError(ServerError):
    """The server came up, but is not what was asked for."""


class SpoolError(HsAssetsError):
    """The spool cannot hold what is asked."""


class EngineError(HsAssetsError):
    """The CPU engine's environment cannot be made or used."""


class PromptError(HsAssetsError):
    """A source or a tokenizer cannot be used."""


class StoreError(HsAssetsError):
    """The store does not hold what it should."""


class StoreVersionError(StoreError):
    """The store was written by a newer version."""


class ExportError(HsAssetsError):
    """Samples cannot be exported as asked."""


class ExtractionError(HsAssetsError):
    """A partition could not be completed."""


class SpecChangedError(ExtractionError):
    """The configuration is not the one that the latest `layer_set` materialisation recorded."""
