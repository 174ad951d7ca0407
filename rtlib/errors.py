"""The errors that a user of the runtime can meet; each carries one line that says what was found and what to do."""


class RtlibError(Exception):
    """Base of every error that the runtime raises on purpose; the command line turns it into exit code 2.

    The message is kept on one line: what it quotes from a file or a prompt may hold line breaks and control characters.
    """

    def __init__(self, message: object) -> None:
        """Take the message, with everything that does not print replaced by spaces."""
        super().__init__("".join(c if c.isprintable() else " " for c in str(message)))


class CheckpointError(RtlibError):
    """A model folder, or a file in it, is missing, damaged, or not what its config says."""


class ConfigError(RtlibError):
    """A model configuration is incomplete, contradictory, or asks for something this runtime does not serve."""


class TokenizerError(RtlibError):
    """A tokenizer file is missing or damaged, or a token id lies outside the vocabulary."""


class PromptError(RtlibError):
    """A prompt is empty, not text, or longer than the context."""


class SamplingError(RtlibError):
    """A sampling parameter is out of range, or a sampler returned something that is no token id."""


class ContextFullError(RtlibError):
    """The sequence has reached the largest number of positions that the runtime was loaded for."""


class OutOfPagesError(RtlibError):
    """The KV page pool has fewer free pages than a sequence needs."""


class StageError(RtlibError):
    """The stage (gpu or sim) that was asked for cannot be had in this process."""


class OutOfMemoryError(RtlibError):
    """The model and its KV cache need more memory than the device or the host has free."""


def join_problems(where: object, problems: list[str]) -> str:
    """Write everything found wrong with one thing as one line: `where`, the count when above one, then each problem."""
    count = "" if len(problems) == 1 else f"{len(problems)} problems: "
    return f"{where}: {count}" + "; ".join(problems)
