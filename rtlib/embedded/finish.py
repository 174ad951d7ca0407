"""The last phase of the embedded model's training: varied text, dropout, and a penalty on lines written twice.

Nothing here rounds a weight or an activation: what quantisation costs is measured, not trained away. Dropout is there
because a network that bears the loss of a few outputs also bears small errors in all of them.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import nn

from rtlib.embedded.export import shape_of
from rtlib.embedded.network import Network
from rtlib.embedded.optimiser import Optimiser
from rtlib.embedded.prompts import NEW_TOKENS
from rtlib.embedded.repetition import unlikelihood
from rtlib.embedded.train import Windows, held_out_loss, read_windows, report_prompts

WARM_UP_STEPS = 10
VARIED_SHARE = 0.6  # of the windows come from the varied text, the others from the whole corpus
START_SHARE = 0.95  # of the windows begin with a document: one cut out of a function teaches wrong indentation
COMPLETION_EVERY = 5  # steps between two looks at the network's own completions
COMPLETION_BATCH = 24  # a third of them of files that begin with an import, where runs of equal lines are likeliest
PROMPT_LENGTHS = (3, 8)  # tokens, the second excluded


def add_dropout(network: Network, share: float) -> None:
    """Drop this share of every linear's outputs while the network trains."""
    for module in network.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda linear, _, output: F.dropout(output, share, linear.training))


def draw_prompts(varied: Windows, imports: Windows) -> torch.Tensor:
    """Return int64 [COMPLETION_BATCH, length]: beginnings of documents, of one random length."""
    length = int(torch.randint(*PROMPT_LENGTHS, (1,)))
    few = COMPLETION_BATCH // 3
    return torch.cat((varied.draw_starts(COMPLETION_BATCH - few, length), imports.draw_starts(few, length)))


def finish(
    network: Network, varied: Windows, whole: Windows, tokenizer: Tokenizer, options: argparse.Namespace
) -> None:
    """Run `options.steps` steps with a learning rate that falls to zero, saving every `options.save_every`."""
    line_end, *heads = (tokenizer.encode(text).ids[0] for text in ("\n", "import", "from"))
    firsts = torch.isin(varied.tokens[varied.starts], torch.tensor(heads, device=varied.tokens.device))
    imports = replace(varied, starts=varied.starts[firsts])
    optimiser = Optimiser(network, options.weight_decay)
    began = time.monotonic()
    for step in range(1, options.steps + 1):
        batch = torch.cat((varied.draw(), whole.draw()))
        loss = F.cross_entropy(network(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        if options.unlikelihood and step % COMPLETION_EVERY == 0:
            prompts = draw_prompts(varied, imports)
            loss = loss + options.unlikelihood * unlikelihood(network, prompts, NEW_TOKENS, line_end)
        loss.backward()
        optimiser.step(options.rate * min(1.0, step / WARM_UP_STEPS, 1 - step / options.steps))
        if step % options.save_every == 0 or step == options.steps:
            network.eval()
            print(f"step {step}, {time.monotonic() - began:.0f} s, held out {held_out_loss(network, tokenizer):.4f}")
            network.train()
            save_file(network.tensors(), options.out / f"step{step}.safetensors", metadata={"format": "pt"})


def read_options() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(prog="python -m rtlib.embedded.finish", description=__doc__)
    parser.add_argument("--corpus", type=Path, default=Path(".corpus"), help="folder of the token files and tokenizer")
    parser.add_argument("--start", type=Path, required=True, help="weights to go on from")
    parser.add_argument("--out", type=Path, required=True, help="folder for stepN.safetensors")
    parser.add_argument("--steps", type=int, default=360)
    parser.add_argument("--save-every", type=int, default=60, metavar="STEPS")
    parser.add_argument("--batch", type=int, default=16, help="windows a step")
    parser.add_argument("--length", type=int, default=256, help="tokens a window")
    parser.add_argument("--rate", type=float, default=3e-4, help="peak learning rate")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.01, help="share of every linear's outputs")
    parser.add_argument("--unlikelihood", type=float, default=0.2, help="weight of the penalty on repeated lines")
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def main() -> None:
    """Finish, then report the prompts in float32."""
    options = read_options()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(options.seed)
    device = torch.device(options.device)
    tokenizer = Tokenizer.from_file(str(options.corpus / "tokenizer.json"))
    tensors = load_file(options.start)
    network = Network(shape_of(tensors)).to(device)
    network.load_state_dict({name.removeprefix("model."): tensor for name, tensor in tensors.items()})
    add_dropout(network, options.dropout)
    varied_batch = round(VARIED_SHARE * options.batch)
    sizes = {"finish.npz": varied_batch, "tokens.npz": options.batch - varied_batch}
    varied, whole = (
        replace(read_windows(options.corpus, name, tokenizer, options.length, size, device), start_share=START_SHARE)
        for name, size in sizes.items()
    )
    finish(network, varied, whole, tokenizer, options)
    network.eval()
    report_prompts(network, tokenizer)


if __name__ == "__main__":
    main()
