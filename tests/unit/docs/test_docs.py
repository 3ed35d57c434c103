# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What the documents show exists, and does what they say."""

import ast
import importlib.util
import re
import shlex
from pathlib import Path

import pytest
import torch
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.zero.muon.cli import main as ds_muon
from deepspeed.runtime.zero.muon.options import check_optimizer_params

from unit.docs.documents import ROOT, anchors, blocks, commands, links, messages_of_package, pages

OWN_PATHS = r"`((?:examples|tests|docs|benchmarks|deepspeed|patches|scripts|requirements)/[\w./-]+)`"


@pytest.mark.parametrize("page", pages())
def test_links_lead_somewhere(page: str):
    for target in links(page):
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), f"{page}: {target}"
        assert not anchor or anchor in anchors(file), f"{page}: {target}"


@pytest.mark.parametrize("page", pages())
def test_named_paths_exist(page: str):
    missing = [path for path in re.findall(OWN_PATHS, (ROOT / page).read_text()) if not (ROOT / path).exists()]
    assert [path for path in missing if not path.startswith("deepspeed/")] == []


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {command.split()[1] for _, command in commands("make")}
    assert named and named <= targets


@pytest.mark.parametrize("page, command", commands("ds_muon"))
def test_planner_commands_run(page: str, command: str, monkeypatch, capsys):
    if "..." in command:
        return  # shortened from one that is on the same page
    monkeypatch.chdir(ROOT)
    # One number of ranks shows that the command is right.
    arguments = shlex.split(re.sub(r"(--world-size \d+)[\d,]*", r"\1", command))[1:]
    assert ds_muon(arguments) == 0
    assert "matrices" in capsys.readouterr().out


@pytest.mark.parametrize("page, command", commands("torchrun") + commands("python"))
def test_scripts_know_their_arguments(page: str, command: str):
    words = shlex.split(command)
    if "-m" in words:
        source = Path(importlib.util.find_spec(words[words.index("-m") + 1]).origin)
    else:
        source = next(ROOT / word for word in words if word.endswith(".py"))
    text = source.read_text()
    own = words[next(index for index, word in enumerate(words) if word.endswith((source.name, source.stem))) + 1:]
    assert all(f'"{word}"' in text or f"'{word}'" in text for word in own if word.startswith("--"))


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_python_runs(block):
    compiled = compile(block.text, str(block), "exec")
    imported = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(block.text)) if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    # The libraries take long to import, and the examples that the blocks are taken from are run elsewhere.
    if imported <= {"torch", "deepspeed"}:
        exec(compiled, {})
    else:
        assert imported <= {"torch", "deepspeed", "transformers", "accelerate", "lightning"}


def test_grouped_trainer_is_the_one_of_the_example():

    def method(text: str) -> str:
        found = [node for node in ast.walk(ast.parse(text)) if getattr(node, "name", "") == "create_optimizer"]
        return "\n".join(ast.unparse(statement) for statement in found[0].body)

    shown = next(block.text for block in blocks("python") if "class GroupedTrainer" in block.text)
    assert method(shown) == method((ROOT / "examples" / "libraries" / "trainer_deepspeed.py").read_text())


@pytest.mark.parametrize("block", [block for block in blocks("text") if block.page == "docs/guide.md"], ids=str)
def test_messages_are_those_of_the_package(block):
    parts = [re.escape(part) for part in re.split(r"\.{3}", " ".join(block.text.split()))]
    pattern = re.compile(".*".join(parts))
    assert any(pattern.search(message) for message in messages_of_package())


def test_auto_that_nothing_has_replaced_is_refused_by_name():
    with pytest.raises(ValueError, match='the value of lr, betas is "auto"'):
        check_optimizer_params({"lr": "auto", "betas": "auto", "eps": 1e-8})


MAXIMA, ROUGHLY = [0.02, 0.003], 1e-6


@pytest.mark.parametrize("name, params, kept", [
    ("WarmupCosineLR", dict(total_num_steps=20, warmup_num_steps=2), True),
    ("WarmupLR", dict(warmup_num_steps=2), True),
    ("WarmupLR", dict(warmup_num_steps=2, warmup_max_lr=MAXIMA), True),
    ("WarmupDecayLR", dict(total_num_steps=20, warmup_num_steps=2, warmup_max_lr=MAXIMA), True),
    ("WarmupLR", dict(warmup_num_steps=2, warmup_max_lr=0.01), False),
    ("WarmupDecayLR", dict(total_num_steps=20, warmup_num_steps=2, warmup_max_lr=0.01), False),
    ("WarmupDecayLR", dict(total_num_steps=20, warmup_num_steps=2), False),
    ("OneCycle", dict(cycle_min_lr=1e-4, cycle_max_lr=1e-2), False),
])
def test_table_of_schedules(name: str, params: dict, kept: bool):
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in MAXIMA]
    # As Muon, it has betas in one group only.
    optimizer = torch.optim.AdamW([dict(params=[weight], lr=rate) for weight, rate in zip(weights, MAXIMA)])
    schedule = getattr(lr_schedules, name)(optimizer, **params)
    for _ in range(8):
        schedule.step()
    muon, adam = (group["lr"] for group in optimizer.param_groups)
    assert (muon == pytest.approx(adam * 20 / 3)) is kept
    assert kept or muon == pytest.approx(adam)
