"""Which failures of a step are worth another try at once: those of the server, and none of the data or the configuration."""

import dagster as dg

RETRIES = 2
SECONDS_TO_WAIT = 15


def retry_if_died(context: dg.AssetExecutionContext, died: str | None) -> None:
    """Have Dagster run the step again, if it was the server that went away and this was not tried often enough.

    The next try starts the server and asks it for what is missing. Where it dies every time, the step goes on and fails.
    """
    if died is not None and context.retry_number < RETRIES:
        context.log.warning("the server went away; once more in %s s: %s", SECONDS_TO_WAIT, died)
        raise dg.RetryRequested(max_retries=RETRIES, seconds_to_wait=SECONDS_TO_WAIT)
