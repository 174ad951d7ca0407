"""Trains the embedded model on the token file that `rtlib.embedded.corpus` makes, and writes its weights."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer

from rtlib.embedded import END_OF_TEXT, HELD_OUT_FILE
from rtlib.embedded.network import Network, Shape
from rtlib.embedded.optimiser import Optimiser
from rtlib.embedded.prompts import NEW_TOKENS, PROMPTS, loops, parses
from rtlib.embedded.vocabulary import CHAT_END

WARM_UP = 0.01  # of the run; the learning rate rises to its peak
DECAY = 0.60  # of the run, at its end; the learning rate falls to zero in a straight line
START_SHARE = 0.5  # of the windows begin with a document, as a prompt does; the others anywhere
REPORT_SECONDS = 30.0


@dataclass
class Windows:
    """Draws training windows of `length` tokens from the token row."""

    tokens: torch.Tensor  # int32 [count]
    starts: torch.Tensor  # int64, where documents begin
    length: int
    batch: int
    start_share: float = START_SHARE

    def draw(self) -> torch.Tensor:
        """Return int64 [batch, length + 1]: inputs and, shifted by one, targets."""
        device = self.tokens.device
        window = torch.arange(self.length + 1, device=device)
        anywhere = torch.randint(len(self.tokens) - self.length - 1, (self.batch,), device=device)
        documents = self.starts[torch.randint(len(self.starts), (self.batch,), device=device)]
        at_start = torch.arange(self.batch, device=device) < self.start_share * self.batch
        begin = torch.where(at_start, documents, anywhere)
        return self.tokens[begin[:, None] + window].long()

    def draw_starts(self, count: int, length: int) -> torch.Tensor:
        """Return int64 [count, length]: the beginnings of documents."""
        device = self.tokens.device
        begin = self.starts[torch.randint(len(self.starts), (count,), device=device)]
        return self.tokens[begin[:, None] + torch.arange(length, device=device)].long()


def read_windows(
    corpus: Path, name: str, tokenizer: Tokenizer, length: int, batch: int, device: torch.device
) -> Windows:
    """Return windows over a token file of the corpus, held on the device."""
    tokens = torch.from_numpy(np.load(corpus / name)["tokens"].astype(np.int32)).to(device)
    ends = (tokens == tokenizer.token_to_id(END_OF_TEXT)).nonzero()[:, 0]
    return Windows(tokens, ends[ends < len(tokens) - length - 2] + 1, length, batch)


def learning_rate(peak: float, progress: float) -> float:
    """Return the rate at `progress` 0..1 through the run: warm-up, plateau, straight fall to zero."""
    return peak * max(0.0, min(1.0, progress / WARM_UP, (1.0 - progress) / DECAY))


@torch.no_grad()
def held_out_loss(network: Network, tokenizer: Tokenizer) -> float:
    """Return the mean loss, in nats per token, over the held-out documents in windows of the training length."""
    device = network.embed_tokens.weight.device
    end, length = tokenizer.token_to_id(END_OF_TEXT), network.shape.positions
    total, count = 0.0, 0
    for document in HELD_OUT_FILE.read_text(encoding="utf-8").split(END_OF_TEXT):
        ids = [*tokenizer.encode(document).ids, end]
        for start in range(0, len(ids) - 1, length):
            window = torch.tensor(ids[start : start + length + 1], device=device)
            loss = F.cross_entropy(network(window[None, :-1])[0].float(), window[1:], reduction="sum")
            total, count = total + loss.item(), count + len(window) - 1
    return total / count


@torch.no_grad()
def complete(network: Network, tokenizer: Tokenizer, prompt: str) -> tuple[str, list[int]]:
    """Return prompt and greedy completion as text, and the new ids; a stop token ends it and is left out."""
    device = network.embed_tokens.weight.device
    stops = {tokenizer.token_to_id(END_OF_TEXT), tokenizer.token_to_id(CHAT_END)}
    ids, new = tokenizer.encode(prompt).ids, []
    while len(new) < NEW_TOKENS:
        token = int(network(torch.tensor([ids + new], device=device))[0, -1].argmax())
        if token in stops:
            break
        new.append(token)
    return tokenizer.decode(ids + new), new


def report_prompts(network: Network, tokenizer: Tokenizer) -> None:
    """Print every prompt's completion, and how many parse and how many loop."""
    parsed = looped = 0
    for prompt in PROMPTS:
        text, new = complete(network, tokenizer, prompt)
        good, loop = parses(text), loops(text, new)
        parsed, looped = parsed + good, looped + loop
        print(f"--- {'parses' if good else 'does not parse'}{', loops' if loop else ''}\n{text}")
    print(f"=== {parsed} of {len(PROMPTS)} parse, {looped} loop")


def train(network: Network, windows: Windows, tokenizer: Tokenizer, options: argparse.Namespace) -> None:
    """Run to the end of `options.steps`, or of `options.minutes`, saving and printing on the way."""
    device = windows.tokens.device
    optimiser = Optimiser(network, options.weight_decay)
    model = torch.compile(network) if options.compile else network

    def batch_loss() -> torch.Tensor:
        batch = windows.draw()
        with torch.autocast(device.type, dtype=torch.bfloat16):
            logits = model(batch[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())

    batch_loss().backward()  # compiles, and is not part of the run: a clocked schedule starts after it
    network.zero_grad()
    began = reported = time.monotonic()
    step, progress = 0, 0.0
    while progress < 1.0:
        loss = batch_loss()
        loss.backward()
        optimiser.step(learning_rate(options.rate, progress))
        step += 1
        if step % 10 == 0 and device.type == "cuda":
            torch.cuda.synchronize()  # the clock below must not run ahead of the device
        now = time.monotonic()
        progress = step / options.steps if options.steps else (now - began) / (60 * options.minutes)
        if now - reported > REPORT_SECONDS or progress >= 1.0:
            reported = now
            tokens = step * windows.batch * windows.length
            held_out = held_out_loss(network, tokenizer)
            save_file(network.tensors(), options.out / "model.safetensors", metadata={"format": "pt"})
            progress_line = f"step {step}, {now - began:.0f} s, {tokens / 1e6:.0f} M tokens"
            print(f"{progress_line}, loss {loss.item():.4f}, held out {held_out:.4f}", flush=True)


def read_options() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(prog="python -m rtlib.embedded.train", description=__doc__)
    parser.add_argument("--corpus", type=Path, default=Path(".corpus"), help="folder of tokens.npz and tokenizer.json")
    parser.add_argument("--out", type=Path, required=True, help="folder for model.safetensors")
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--steps", type=int, help="length of the run in steps: repeatable")
    length.add_argument("--minutes", type=float, help="length of the run by the clock; the schedule follows it")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--intermediate", type=int, default=384)
    parser.add_argument("--batch", type=int, default=256, help="windows of 512 tokens a step")
    parser.add_argument("--rate", type=float, default=6e-3, help="peak learning rate")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="use torch.compile")
    return parser.parse_args()


def main() -> None:
    """Train, then report the held-out loss and the prompts in float32."""
    options = read_options()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device(options.device)
    tokenizer = Tokenizer.from_file(str(options.corpus / "tokenizer.json"))
    network = Network(Shape(layers=options.layers, intermediate=options.intermediate)).to(device)
    windows = read_windows(options.corpus, "tokens.npz", tokenizer, network.shape.positions, options.batch, device)
    print(f"{sum(p.numel() for p in network.parameters()):,} parameters, {len(windows.tokens):,} tokens", flush=True)
    train(network, windows, tokenizer, options)
    torch.set_float32_matmul_precision("highest")
    print(f"held-out loss in float32: {held_out_loss(network, tokenizer):.4f}")
    report_prompts(network, tokenizer)


if __name__ == "__main__":
    main()
