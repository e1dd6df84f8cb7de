"""Two processes train a drafter as one does: the same blocks, the same loss curve, a file that loads."""

import json
import subprocess
import sys

import pytest
import torch

from lean_laguna.models.checkpoint import load_laguna
from lean_laguna.models.checkpoint_writer import save_laguna
from lean_laguna.models.drafter_checkpoint import load_drafter
from lean_laguna.train.target import build_target
from support.training import target_recipe, write_data, write_documents_recipe


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    write_data(folder / "data")
    target = build_target(target_recipe(init_std=0.1), torch.device("cpu"), "test")
    save_laguna(target, target.config, folder / "target", dtype=torch.float32)
    for file in (folder / "data" / "tokenizer").iterdir():
        (folder / "target" / file.name).write_bytes(file.read_bytes())
    generator = torch.Generator().manual_seed(0)
    rows = []
    for i in range(12):
        ids = torch.randint(13, 300, (60 + 5 * i,), generator=generator).tolist()
        rows.append({"id": str(i), "input_ids": ids, "loss_mask": [0] * 8 + [1] * (len(ids) - 8)})
    (folder / "documents.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_documents_recipe(folder / "recipe.toml", dspark=True, batch_rows=4, accumulate=2)
    return folder


def train(base, name, processes, steps):
    launch = [
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={processes}",
        "--master-port=0",
        "--standalone",
    ]
    command = [sys.executable, *(launch if processes > 1 else []), "-m", "lean_laguna", "train", "drafter"]
    command += ["--recipe", base / "recipe.toml", "--target", base / "target", "--device", "cpu"]
    command += ["--documents", base / "documents.jsonl", "--out", base / name, "--steps", str(steps)]
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in (base / name / "train_log.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines if line["event"] == "step"}


@pytest.mark.slow
def test_two_processes_have_the_loss_curve_of_one_and_resume(base):
    one = train(base, "one", 1, 50)
    two = train(base, "two", 2, 50)
    assert one.keys() == two.keys() == {1, 25, 50}
    for step, line in one.items():
        # The same sums in another order, in float32, through up to 50 steps of Adam.
        assert two[step]["loss"] == pytest.approx(line["loss"], rel=2e-3), step
        assert two[step]["grad_norm"] == pytest.approx(line["grad_norm"], rel=2e-2), step
    config = load_laguna(base / "target").config
    drafters = [load_drafter(base / name, config) for name in ("one", "two")]
    for (name, mine), other in zip(
        drafters[0].state_dict().items(), drafters[1].state_dict().values(), strict=True
    ):
        torch.testing.assert_close(other, mine, rtol=0.05, atol=0.02, msg=name)
    again = train(base, "two", 2, 50)  # nothing is left to do: the state is whole, and is read back
    assert again.keys() == two.keys()
