"""The errors quire raises.

QuireError
├── ConfigError              a setting that cannot work
├── ModelFileError           a file that is missing, broken or lying
├── UnsupportedModelError    a sound file of a kind we do not run
├── RequestError             one request asks for something impossible
│   ├── RequestCancelledError   its owner took it back
│   ├── DeadlineError           it ran out of time
│   └── ContextLengthError      it does not fit into the context
├── OverloadedError          the queue is full; says when to come back
└── ExecutorError            the machinery failed
    ├── RowFaultError           ... for one sequence alone (NaN, a grammar that raised)
    ├── ExecutorMemoryError     ... for want of memory
    ├── StepTimeoutError        ... by not answering in time (the step may still run)
    ├── StepCancelledError      ... because the step heeded its cancel flag
    └── WorkerCrashError        ... twice, and this request is the likely cause
"""


class QuireError(Exception):
    """Base of everything quire raises on purpose."""


class ConfigError(QuireError, ValueError):
    """A setting that cannot work."""


class ModelFileError(QuireError):
    """A model file that is missing, broken or lying."""


class UnsupportedModelError(QuireError):
    """A sound model file of a kind that quire does not run."""


class RequestError(QuireError, ValueError):
    """One request asks for something impossible; the others go on.

    `param` is the name of the wrong parameter in the call that was made, if one is wrong.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class RequestCancelledError(RequestError):
    """The request's owner took it back."""


class DeadlineError(RequestError):
    """The request ran out of time."""


class ContextLengthError(RequestError):
    """The prompt, or prompt and completion together, do not fit into the context."""

    def __init__(self, message: str, *, param: str | None = None, max_context: int = 0) -> None:
        super().__init__(message, param=param)
        self.max_context = max_context


class OverloadedError(QuireError):
    """There is no room now: the queue is full, or too many large constraints are in use."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ExecutorError(QuireError):
    """The machinery that computes steps failed."""


class RowFaultError(ExecutorError):
    """One sequence's row of a step failed; the other rows are sound."""


class ExecutorMemoryError(ExecutorError):
    """A step could not get the memory it needs."""


class StepTimeoutError(ExecutorError):
    """A step did not answer in time; it may still be running."""


class StepCancelledError(ExecutorError):
    """A step stopped because its cancel flag was raised."""


class WorkerCrashError(ExecutorError):
    """The worker process died while it ran this request, and again when it ran it anew."""
