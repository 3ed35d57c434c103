# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Trains a small Llama on the standard library's sources with Muon or AdamW, from a ready ds_config.

Run it under torchrun or the deepspeed launcher:
    torchrun --standalone --nproc-per-node 2 examples/train.py --engine zero2 --opt muon
Writes loss.csv, loss.png, samples.txt and settings.json to OUT/ENGINE-OPT/, with --stats also muon_stats.csv and
muon_stats.png, and OUT/ENGINE-muon-vs-adamw.png once both optimizers have been run with the same settings.
"""

import argparse
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator

# The process's age in the table of losses counts the imports too: a user waits for them.
STARTED = time.monotonic()

# The model is made from a config, nothing may be fetched; without this transformers may ask the hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import deepspeed  # noqa: E402
import torch  # noqa: E402
from deepspeed import comm as dist  # noqa: E402
from tqdm import tqdm  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from ds_config import ENGINES, OPTIMIZERS, load_ds_config, schedule_steps  # noqa: E402
from loss_table import LossRow  # noqa: E402
from results import Settings, compare, write_run, write_stats  # noqa: E402
from stats_table import StatsRow, stats_rows  # noqa: E402
from text import VOCAB_SIZE, Corpus, load_corpus, random_windows, spaced_windows  # noqa: E402

EVALUATIONS = 20
# Steps whose updates are looked at, with --stats.
STATISTICS = 50
VALIDATION_WINDOWS = 128
# One length, so that they are one batch without padding.
PROMPTS = ("import os\nimport sys\n", "    def __init__(self", "class Stream(object):", "def parse(text, flags")


@dataclass(frozen=True)
class Evaluation:
    """Means over all ranks, in nats per byte, and whether any rank's time is up."""
    train_loss: float
    val_loss: float
    time_is_up: bool


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=ENGINES, default="bf16", help="the ds_config to use (default: bf16)")
    parser.add_argument("--opt", choices=OPTIMIZERS, default="muon", help="the optimizer (default: muon)")
    parser.add_argument("--steps", type=int, help="optimizer steps (default: the length of the ds_config's schedule)")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="folder for results (default: runs)")
    parser.add_argument("--seed", type=int, default=1, help="seed of weights, batches and samples (default: 1)")
    parser.add_argument("--max-minutes", type=float, default=3.5, help="stop early after this time (default: 3.5)")
    parser.add_argument("--hidden-size", type=int, default=192, help="width of the model (default: 192)")
    parser.add_argument("--layers", type=int, default=4, help="number of layers (default: 4)")
    parser.add_argument("--heads",
                        type=int,
                        default=6,
                        help="query heads; half as many key-value heads if even (default: 6)")
    parser.add_argument("--stats", action="store_true", help="plot statistics of Muon's updates (--opt muon only)")
    parser.add_argument("--sequence-length", type=int, default=128, help="bytes in a sequence (default: 128)")
    # The deepspeed launcher passes it; the rank is read from the environment, which torchrun sets too.
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.sequence_length <= len(PROMPTS[0]):
        parser.error(
            f"--sequence-length {args.sequence_length}: samples start with {len(PROMPTS[0])} bytes, take more")
    if args.hidden_size % (2 * args.heads):
        # The rotary position encoding turns pairs of elements within a head.
        parser.error(f"--hidden-size {args.hidden_size} is not a multiple of 2 * --heads {args.heads}")
    if args.steps is not None and args.steps < 1:
        parser.error(f"--steps {args.steps}: at least 1 is needed")
    if args.stats and args.opt != "muon":
        parser.error(f"--stats: {args.opt} has no updates to orthogonalize, use --opt muon")
    return args


def build_model(args: argparse.Namespace) -> LlamaForCausalLM:
    """A Llama with grouped-query attention, in fp32 on the CPU, the same weights on every rank."""
    torch.manual_seed(args.seed)
    config = LlamaConfig(vocab_size=VOCAB_SIZE,
                         hidden_size=args.hidden_size,
                         intermediate_size=args.hidden_size * 8 // 3,
                         num_hidden_layers=args.layers,
                         num_attention_heads=args.heads,
                         num_key_value_heads=args.heads if args.heads % 2 else args.heads // 2,
                         max_position_embeddings=args.sequence_length,
                         tie_word_embeddings=False,
                         bos_token_id=None,
                         eos_token_id=None)
    return LlamaForCausalLM(config)


def training_batches(corpus: Corpus, args: argparse.Namespace, micro_batch: int) -> Iterator[torch.Tensor]:
    """Yields this rank's micro-batches without end, int64 [micro_batch, sequence_length] on the CPU."""
    generator = torch.Generator().manual_seed(args.seed * 100_003 + dist.get_rank())
    while True:
        yield random_windows(corpus.train, micro_batch, args.sequence_length, generator)


def validation_batches(corpus: Corpus, args: argparse.Namespace, micro_batch: int) -> list[torch.Tensor]:
    """This rank's share of VALIDATION_WINDOWS fixed windows.

    Windows repeat where ranks and micro-batches do not divide them: under ZeRO-3 all ranks must make the same number
    of forward passes, or those that make more wait for ever.
    """
    windows = spaced_windows(corpus.validation, VALIDATION_WINDOWS, args.sequence_length)
    batches = -(-VALIDATION_WINDOWS // (dist.get_world_size() * micro_batch))
    first = dist.get_rank() * batches * micro_batch
    mine = torch.arange(first, first + batches * micro_batch) % VALIDATION_WINDOWS
    return list(windows[mine].split(micro_batch))


def train_step(engine: deepspeed.DeepSpeedEngine, batches: Iterator[torch.Tensor]) -> torch.Tensor:
    """One optimizer step; returns the mean loss of this rank's micro-batches, fp32 scalar."""
    total = torch.zeros((), device=engine.device)
    for _ in range(engine.gradient_accumulation_steps()):
        tokens = next(batches).to(engine.device)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        total += loss.detach().float()
    return total / engine.gradient_accumulation_steps()


@torch.no_grad()
def evaluate(engine: deepspeed.DeepSpeedEngine, batches: list[torch.Tensor], train_loss: torch.Tensor,
             max_minutes: float) -> Evaluation:
    """Measures the validation loss and averages it and ``train_loss`` over the ranks."""
    engine.eval()
    val_loss = torch.zeros((), device=engine.device)
    for batch in batches:
        tokens = batch.to(engine.device)
        val_loss += engine(input_ids=tokens, labels=tokens).loss.float() / len(batches)
    engine.train()
    # Clocks differ between ranks, and a rank that stopped alone would leave the others waiting: all must agree.
    late = torch.tensor(float(time.monotonic() - STARTED > 60 * max_minutes), device=engine.device)
    totals = torch.stack([train_loss, val_loss, late])
    dist.all_reduce(totals)
    mean_train, mean_val, late_share = (totals / dist.get_world_size()).tolist()
    return Evaluation(train_loss=mean_train, val_loss=mean_val, time_is_up=late_share > 0)


def train(engine: deepspeed.DeepSpeedEngine, corpus: Corpus, args: argparse.Namespace, steps: int,
          stats: list[StatsRow]) -> list[LossRow]:
    """Trains for ``steps`` optimizer steps or until time is up; returns a LossRow for each evaluation.

    With ``--stats`` the statistics of Muon's updates are added to ``stats``.
    """
    micro_batch = engine.train_micro_batch_size_per_gpu()
    batches = training_batches(corpus, args, micro_batch)
    held_out = validation_batches(corpus, args, micro_batch)
    interval = max(1, steps // EVALUATIONS)
    tokens_per_step = engine.train_batch_size() * args.sequence_length
    unknown = torch.tensor(float("nan"), device=engine.device)
    result = evaluate(engine, held_out, unknown, args.max_minutes)
    rows = [LossRow(0, 0, time.monotonic() - STARTED, result.train_loss, result.val_loss)]
    losses: list[torch.Tensor] = []
    with tqdm(total=steps, desc=f"{args.engine} {args.opt}", unit="step", disable=dist.get_rank() != 0) as bar:
        for step in range(1, steps + 1):
            losses.append(train_step(engine, batches))
            if args.stats:
                # Sums over the ranks, so all of them ask.
                stats.extend(stats_rows(engine.basic_optimizer.muon_stats(new_only=True)))
            bar.update()
            if step % interval and step != steps:
                continue
            result = evaluate(engine, held_out, torch.stack(losses).mean(), args.max_minutes)
            losses.clear()
            seconds = time.monotonic() - STARTED
            rows.append(LossRow(step, step * tokens_per_step, seconds, result.train_loss, result.val_loss))
            bar.set_postfix(train=f"{result.train_loss:.3f}", val=f"{result.val_loss:.3f}")
            if result.time_is_up:
                break
    if rows[-1].step < steps and dist.get_rank() == 0:
        print(f"stopped at step {rows[-1].step} of {steps}: --max-minutes {args.max_minutes:g} have passed")
    return rows


@torch.no_grad()
def generate_samples(engine: deepspeed.DeepSpeedEngine, args: argparse.Namespace) -> list[str]:
    """Continues each of PROMPTS to ``sequence_length`` bytes; the model has not learned positions beyond.

    Every rank must call it: under ZeRO-3 each forward pass gathers parameters from all ranks. The seed and the fixed
    length keep the ranks in step.
    """
    engine.eval()
    torch.manual_seed(args.seed)
    prompts = torch.tensor([list(prompt.encode()) for prompt in PROMPTS], device=engine.device)
    tokens = engine.module.generate(prompts,
                                    attention_mask=torch.ones_like(prompts),
                                    max_new_tokens=args.sequence_length - prompts.shape[1],
                                    do_sample=True,
                                    temperature=0.6,
                                    top_k=40,
                                    pad_token_id=0)
    engine.train()
    return [bytes(sample).decode(errors="replace") for sample in tokens.tolist()]


def report(rows: list[LossRow], samples: list[str], settings: Settings, args: argparse.Namespace) -> None:
    """Writes the results and says where they are. Rank 0 only."""
    folder = args.out / f"{args.engine}-{args.opt}"
    write_run(folder, rows, samples, settings)
    print(f"validation loss {rows[0].val_loss:.3f} -> {rows[-1].val_loss:.3f} nats per byte in {rows[-1].step} steps, "
          f"{time.monotonic() - STARTED:.0f} s")
    print(f"results: {folder}/loss.png, loss.csv, samples.txt, settings.json")
    print(compare(args.out, args.engine))


def main() -> None:
    args = parse_arguments()
    config = load_ds_config(args.engine, args.opt, args.steps)
    steps = schedule_steps(config)
    if args.stats:
        config["optimizer"]["params"]["muon_stats_every"] = max(1, steps // STATISTICS)
    corpus = load_corpus()
    model = build_model(args)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    settings = Settings(steps=steps,
                        seed=args.seed,
                        world_size=dist.get_world_size(),
                        sequences_per_step=engine.train_batch_size(),
                        hidden_size=args.hidden_size,
                        layers=args.layers,
                        heads=args.heads,
                        sequence_length=args.sequence_length)
    if dist.get_rank() == 0:
        print(f"{parameters:,} parameters; {corpus.train.numel():,} bytes of text in {len(corpus.train_files)} files, "
              f"{corpus.validation.numel():,} bytes in {len(corpus.validation_files)} files held out")
    stats: list[StatsRow] = []
    rows = train(engine, corpus, args, steps, stats)
    samples = generate_samples(engine, args)
    if dist.get_rank() == 0:
        report(rows, samples, settings, args)
        if stats:
            folder = args.out / f"{args.engine}-{args.opt}"
            write_stats(folder, stats, settings)
            print(f"statistics of the updates: {folder}/muon_stats.png, muon_stats.csv")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
