"""The command line: generate, chat, quantize, bench, check. A user's mistake is one line on stderr and exit code 2."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from kernels_numba.errors import KernelError, StageError
from rtlib.errors import ContextFullError, RtlibError

PROMPT = "def fibonacci(n):"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the process's exit code: 0, 2 for a user's mistake, 130 after Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character shows "?" in its place
    try:
        options = _parser().parse_args(arguments)
        return options.run(options) or 0
    except (RtlibError, StageError, KernelError) as error:
        print(f"rtlib: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        sys.stderr.close()  # whoever read the output has gone: nothing is left to say
        return 0
    except KeyboardInterrupt:
        print("rtlib: interrupted", file=sys.stderr)
        return 130


class _Parser(argparse.ArgumentParser):
    """An argument parser whose complaint is one line too."""

    def error(self, message: str) -> NoReturn:
        raise RtlibError(f"{message}; see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m rtlib", description=(__doc__ or "").split(":")[0] + ".")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    generate = _command(commands, "generate", _generate, "complete a prompt")
    generate.add_argument("prompt", nargs="?", default=PROMPT, help="the text to complete (default: %(default)r)")
    _add_model(generate)
    _add_sampling(generate)
    chat = _command(
        commands, "chat", _chat, "answer messages, one per line of standard input, through the chat template"
    )
    chat.add_argument("--system", help="the system message")
    _add_model(chat)
    _add_sampling(chat)
    quantize = _command(commands, "quantize", _quantize, "pack a checkpoint as INT4, so that it loads in seconds")
    quantize.add_argument("source", help="a model folder, or an id in the Hugging Face cache")
    quantize.add_argument("target", help="the folder to write; it must not exist, or be empty")
    quantize.add_argument("--group", type=int, default=128, choices=(32, 64, 128), help="weights that share a scale")
    quantize.add_argument("--overwrite", action="store_true", help="replace a folder that holds a packed model")
    bench = _command(commands, "bench", _bench, "measure decode and prefill")
    _add_model(bench)
    bench.add_argument("--contexts", type=_count, nargs="+", default=None, help="positions before the measured tokens")
    bench.add_argument("--tokens", type=_count, default=None, help="tokens measured at each context")
    _command(commands, "check", _check, "check Python, numba, driver, GPU and memory, and say which stage will be used")
    return parser


def _command(commands: Any, name: str, run: Callable, about: str) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=about, description=about[0].upper() + about[1:] + ".")
    command.set_defaults(run=run)
    command.add_argument("--json", type=_new_file, metavar="FILE", help="also write the results to FILE")
    return command


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return int(text)


def _new_file(text: str) -> Path:
    """A path that can be written: found out before the work is done, not after it."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: a folder, or in a folder that does not exist")
    return path


def _add_model(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--model", help='a folder, an id in the Hugging Face cache, or "synthetic:NAME" (default: the embedded model)'
    )
    command.add_argument("--max-context", type=int, help="positions that the KV cache holds")
    command.add_argument(
        "--activation",
        choices=("int8", "fp16", "bf16"),
        default="int8",
        help="what the GEMVs read (default: %(default)s)",
    )
    command.add_argument(
        "--attention",
        choices=("split", "ring"),
        default="split",
        help="the decode attention kernel (default: %(default)s)",
    )


def _add_sampling(command: argparse.ArgumentParser) -> None:
    command.add_argument("--max-new-tokens", type=int, default=48)
    command.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    command.add_argument("--top-k", type=int, default=0, help="0 is off (default)")
    command.add_argument("--top-p", type=float, default=1.0, help="1 is off (default)")
    command.add_argument("--repetition-penalty", type=float, default=1.0, help="1 is off (default)")
    command.add_argument("--seed", type=int, help="repeats a drawn completion")


def _load(options: argparse.Namespace) -> Any:
    from rtlib.runtime import Runtime

    return Runtime.load(
        options.model, max_context=options.max_context, activation=options.activation, attention=options.attention
    )


def _sampling(options: argparse.Namespace) -> Any:
    from rtlib.sampler import SamplingParams

    names = ("max_new_tokens", "temperature", "top_k", "top_p", "repetition_penalty", "seed")
    return SamplingParams(**{name: getattr(options, name) for name in names})


def _generate(options: argparse.Namespace) -> None:
    params = _sampling(options)
    with _load(options) as runtime:
        pieces = runtime.generate(options.prompt, params)  # refuses a bad prompt before anything is printed
        print(options.prompt, end="", flush=True)
        text = _stream(pieces)
        _report(runtime, options, {"prompt": options.prompt, "text": text})


def _chat(options: argparse.Namespace) -> None:
    params = _sampling(options)
    messages = [{"role": "system", "content": options.system}] if options.system else []
    with _load(options) as runtime:
        for line in _lines():
            messages.append({"role": "user", "content": line.rstrip("\n")})
            messages.append({"role": "assistant", "content": _stream(runtime.chat(messages, params))})
        _report(runtime, options, {"messages": messages})


def _lines() -> Iterator[str]:
    try:
        yield from sys.stdin
    except UnicodeDecodeError as error:
        raise RtlibError(f"standard input is not {error.encoding}: {error.reason} at byte {error.start}") from None


def _stream(pieces: Iterator[str]) -> str:
    text = ""
    for piece in pieces:
        print(piece, end="", flush=True)
        text += piece
    print()
    return text


def _report(runtime: Any, options: argparse.Namespace, results: dict[str, Any]) -> None:
    print(f"[{runtime.stage}] {runtime.last_stats.summary()}", file=sys.stderr)
    _write(options.json, results | {"stage": runtime.stage, "stats": runtime.last_stats.to_dict()})
    if runtime.last_stats.finish_reason == "context":
        most = runtime.options.max_context
        raise ContextFullError(
            f"the context of {most} positions is full; ask for fewer tokens or a larger --max-context"
        )


def _write(path: Path | None, results: dict[str, Any]) -> None:
    if path is None:
        return
    try:
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise RtlibError(f"{path}: cannot be written ({error.strerror}); name another file") from None


def _quantize(options: argparse.Namespace) -> None:
    from rtlib import packed
    from rtlib.checkpoint import Checkpoint
    from rtlib.weights import quantise_checkpoint

    checkpoint = Checkpoint.open(options.source)
    weights = quantise_checkpoint(checkpoint, options.group)
    written = packed.save(weights, options.target, checkpoint.folder, overwrite=options.overwrite)
    print(f"{written}: {weights.nbytes / 1e9:.3f} GB, INT4 in groups of {weights.group}")
    _write(options.json, {"folder": str(written), "bytes": weights.byte_counts, "group": weights.group})


def _bench(options: argparse.Namespace) -> None:
    from rtlib import bench

    results = bench.measure(options)
    print(bench.table(results))
    _write(options.json, results)


def _check(options: argparse.Namespace) -> int:
    from rtlib import check

    results = check.run_checks()
    check.print_checks(results)
    _write(options.json, {"checks": [list(r) for r in results]})
    return int(any(r[0] == "FAIL" for r in results))
