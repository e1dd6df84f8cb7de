import dataclasses
import json
import resource
import time

import pytest
import torch
from safetensors.torch import load_file

from lean_laguna.core.errors import ConfigError, DataError
from lean_laguna.models.checkpoint import load_laguna
from lean_laguna.models.checkpoint_writer import save_laguna
from lean_laguna.models.drafter_checkpoint import load_drafter
from lean_laguna.models.tokenizer import Tokenizer
from lean_laguna.tasks.prompts import load_prompts
from lean_laguna.train import document_stages, loop
from lean_laguna.train.document_stages import run_documents, run_responses, split_documents
from lean_laguna.train.documents import Document
from lean_laguna.train.responses import ResponseOptions
from lean_laguna.train.stages import StageOptions
from lean_laguna.train.target import build_target
from support.training import DRAFTER_MODEL, drafter_recipe, target_recipe, write_documents_recipe

OPTIONS = ResponseOptions(temperature=0.8, max_tokens=24, batch=4, thinking=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, data):
    """A tiny target, and its answers to a dozen prompts."""
    base = tmp_path_factory.mktemp("documents")
    target = build_target(target_recipe(init_std=0.1), torch.device("cpu"), "test")
    save_laguna(target, target.config, base / "target", dtype=torch.float32)
    for file in (data / "tokenizer").iterdir():
        (base / "target" / file.name).write_bytes(file.read_bytes())
    rows = [{"id": f"q{i}", "prompt": f"Do it {i}"} for i in range(12)]
    (base / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    answer(base, base / "answers.jsonl")
    return base


def answer(base, out, options=OPTIONS, is_given=False, report=print, echo=lambda kind, values: None):
    return run_responses(
        base / "prompts.jsonl", base / "target", out, options,
        device="cpu", drafter=None, is_given=is_given, report=report, echo=echo,
    )  # fmt: skip


def train(base, folder, steps=4, features=None, dspark=True, report=print, **changes):
    recipe = write_documents_recipe(folder / "recipe.toml", dspark=dspark, **changes)
    options = StageOptions(
        folder, folder / "out", folder / "work", torch.device("cpu"), time.monotonic(), steps=steps,
        report=report, echo=lambda kind, values: None,
    )  # fmt: skip
    return run_documents(recipe, base / "target", base / "answers.jsonl", options, features=features)


def other_folder(folder):
    (folder / "other").mkdir()
    return folder / "other"


def weights(folder):
    return load_file(folder / "out" / "model.safetensors")


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_answers_are_the_engines_tokens_and_a_killed_run_goes_on_to_the_same_file(folder, tmp_path):
    whole = (folder / "answers.jsonl").read_text()
    documents = [json.loads(line) for line in whole.splitlines()]
    assert [d["id"] for d in documents] == [f"q{i}" for i in range(12)]
    assert all(sum(d["loss_mask"]) >= 1 and len(d["input_ids"]) == len(d["loss_mask"]) for d in documents)
    out = tmp_path / "answers.jsonl"
    out.write_text("\n".join(whole.splitlines()[:5]) + "\n" + whole.splitlines()[5][:20])
    meta = (folder / "answers.jsonl.meta.json").read_text()
    (tmp_path / "answers.jsonl.meta.json").write_text(meta)
    counts = answer(folder, out)
    assert counts == {"documents": 12, "resumed": 5, "left_out": 0}
    assert out.read_text() == whole
    assert json.loads(meta)["sampling"] == dataclasses.asdict(OPTIONS)
    with pytest.raises(ConfigError, match=r"another sampling \(temperature was 0\.8 and is 0\.5\)"):
        answer(folder, out, dataclasses.replace(OPTIONS, temperature=0.5))


def test_an_interrupted_run_keeps_every_answer_that_was_whole(folder, tmp_path):
    """Also those that were whole before one asked earlier; in the end the file is an uninterrupted run's."""
    out, told = tmp_path / "answers.jsonl", []

    def interrupt(kind, values):
        told.append(values["answered"])
        if len(told) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        answer(folder, out, echo=interrupt)
    assert len(out.read_text().splitlines()) == told[-1] >= 5
    shuffled = out.read_text().splitlines(keepends=True)[::-1]
    out.write_text("".join(shuffled))
    assert answer(folder, out) == {"documents": 12, "resumed": told[-1], "left_out": 0}
    assert out.read_bytes() == (folder / "answers.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("answers", "meta", "error", "message"),
    [
        (b"{}\n", None, ConfigError, "no whole 'answers.jsonl.meta.json'"),
        (b"{}\n", b"[]", ConfigError, "no whole 'answers.jsonl.meta.json'"),
        (b"{}\n", b"\xff", ConfigError, "no whole 'answers.jsonl.meta.json'"),
        (b"{}\n", b"{}", ConfigError, "begun with another target_sha256"),
        (b"\xff\n", ..., DataError, "line 1: not a document"),
        (b'{"id": 1}\n[1]\n', ..., DataError, "line 2: not a document"),
    ],
)
def test_damaged_answers_are_refused_before_weights_are_read(
    folder, tmp_path, monkeypatch, answers, meta, error, message
):
    monkeypatch.setattr(document_stages, "LLM", None)
    out, beside = tmp_path / "answers.jsonl", tmp_path / "answers.jsonl.meta.json"
    out.write_bytes(answers)
    if meta is not None:
        beside.write_bytes((folder / "answers.jsonl.meta.json").read_bytes() if meta is ... else meta)
    with pytest.raises(error, match=message):
        answer(folder, out)
    assert out.read_bytes() == answers


def test_a_conversation_without_a_question_is_refused_before_weights_are_read(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(document_stages, "LLM", None)
    rows = [{"prompt": "Do it"}, {"id": "z", "messages": [{"role": "assistant", "content": "Done."}]}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match="conversation 'z': no message of the user"):
        run_responses(
            tmp_path / "prompts.jsonl", folder / "target", tmp_path / "answers.jsonl", OPTIONS,
            device="cpu", drafter=None, is_given=False, report=print,
        )  # fmt: skip
    assert not (tmp_path / "answers.jsonl.meta.json").exists()


def test_a_folder_in_place_of_the_answers_is_refused(folder, tmp_path):
    with pytest.raises(ConfigError, match="it is a folder; give a file name"):
        answer(folder, tmp_path)


def test_a_dspark_drafter_is_trained_on_documents_calibrated_and_loads(folder, tmp_path):
    figures = train(folder, tmp_path)
    assert 1.0 <= figures["documents_tau_chain"] <= 6.0
    assert figures["ece_after"] <= figures["ece_before"] + 0.1
    drafter = load_drafter(tmp_path / "out", load_laguna(folder / "target").config)
    assert len(drafter.config.dspark.sampled_temperatures) == drafter.config.max_draft_tokens
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert set(written["provenance"]) == {"target_sha256", "data_sha256"}
    steps = [json.loads(line) for line in (tmp_path / "out" / "train_log.jsonl").read_text().splitlines()]
    first = next(event for event in steps if event["event"] == "step")
    assert {"loss", "ce", "l1", "confidence", "acceptance", "tau_prob", "eta_s"} <= first.keys()


def test_cached_features_give_the_weights_of_those_computed_when_needed(folder, tmp_path):
    said = []
    for name, features in (
        ("online", None),
        ("cached", tmp_path / "features"),
        ("again", tmp_path / "features"),
    ):
        (tmp_path / name).mkdir()
        train(folder, tmp_path / name, features=features, report=said.append)
    assert same(weights(tmp_path / "online"), weights(tmp_path / "cached"))
    assert same(weights(tmp_path / "online"), weights(tmp_path / "again"))
    needed = sum(file.stat().st_size for file in (tmp_path / "features").glob("*.bf16"))
    told = [line for line in said if "bytes to write" in line]
    assert len(told) == 1
    assert f"features: {needed:,} bytes to write" in told[0]
    shard = next((tmp_path / "features").glob("*.bf16"))
    shard.write_bytes(shard.read_bytes()[:-2])
    with pytest.raises(DataError, match="remove it"):
        train(folder, other_folder(tmp_path), features=tmp_path / "features")


def test_holding_out_every_document_is_refused():
    documents = [Document(str(i), torch.tensor([1]), torch.tensor([True])) for i in range(5)]
    with pytest.raises(DataError, match=r"'held_out_share' is 0\.95: all 5 documents are held out"):
        split_documents(documents, drafter_recipe(held_out_share=0.95))
    kept, held_out = split_documents(documents, drafter_recipe(held_out_share=0.8))
    assert (len(kept), len(held_out)) == (1, 4)


def test_features_of_other_rows_are_refused(folder, tmp_path):
    train(folder, tmp_path, features=tmp_path / "features")
    with pytest.raises(ConfigError, match="holds features of something else: rows_sha256"):
        train(folder, other_folder(tmp_path), features=tmp_path / "features", length=120)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_resumed_run_has_the_loss_curve_and_weights_of_an_uninterrupted_one(
    folder, tmp_path, monkeypatch, kind
):
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    train(folder, tmp_path / "whole", steps=6, accumulate=2, kind=kind)
    progress = loop.Budget.progress
    monkeypatch.setattr(
        loop.Budget,
        "progress",
        lambda self, step, elapsed: progress(self, step, elapsed) if step < 3 else 1.0,
    )
    train(folder, tmp_path / "cut", steps=6, accumulate=2, kind=kind)
    monkeypatch.undo()
    train(folder, tmp_path / "cut", steps=6, accumulate=2, kind=kind)
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "cut"))


def test_a_full_disk_names_the_state_and_the_next_run_goes_on(folder, tmp_path):
    """Here a limit on the size of files plays the disk."""
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    train(folder, tmp_path / "whole")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(ConfigError, match=r"cannot write .*state.pt: File too large"):
            train(folder, tmp_path / "cut")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [file.name for file in (tmp_path / "cut" / "work").iterdir()] == ["run.json"]
    train(folder, tmp_path / "cut")
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "cut"))


@pytest.mark.parametrize("damaged", [b"", b"[1]", b"\xff"])
def test_a_damaged_note_of_the_features_is_refused(folder, tmp_path, damaged):
    train(folder, tmp_path, features=tmp_path / "features")
    (note,) = (tmp_path / "features").glob("*.json")
    note.write_bytes(damaged)
    with pytest.raises(DataError, match="is damaged; remove the folder"):
        train(folder, other_folder(tmp_path), features=tmp_path / "features")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 32}, "'hidden_size' is 32, but the target's is 16"),
        ({"vocab_size": 321, "draft_vocab_size": 321}, "'vocab_size' is 321, but the target's is 320"),
        ({"num_target_layers": 5}, "'num_target_layers' is 5, but the target has 3 layers"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused_before_weights_are_read(folder, tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        train(folder, tmp_path, model=DRAFTER_MODEL | changes, dspark=False)
    assert not (tmp_path / "work").exists()


def test_given_answers_that_do_not_fit_the_disk_leave_the_older_ones_and_their_note(folder, tmp_path):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "given.jsonl"

    def give(options, answer):
        prompts.write_text(json.dumps({"prompt": "say", "response": answer}) + "\n")
        run_responses(
            prompts, folder / "target", out, options, device="cpu", drafter=None, is_given=True, report=print
        )

    give(OPTIONS, "yes")
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir() if file != prompts}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9_000, limits[1]))
    try:
        with pytest.raises(ConfigError, match=r"cannot write .*given.jsonl: File too large"):
            give(dataclasses.replace(OPTIONS, thinking=True), "no " * 2_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir() if file != prompts} == before


def test_given_answers_are_masked_by_the_template(folder, tmp_path):
    rows = [{"id": f"g{i}", "prompt": "Do it", "response": "def f():\n    return 1"} for i in range(4)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = []
    run_responses(
        tmp_path / "prompts.jsonl", folder / "target", tmp_path / "given.jsonl", OPTIONS,
        device="cpu", drafter=None, is_given=True, report=said.append,
    )  # fmt: skip
    documents = [json.loads(line) for line in (tmp_path / "given.jsonl").read_text().splitlines()]
    assert len(documents) == 4
    assert 0 < sum(documents[0]["loss_mask"]) < len(documents[0]["loss_mask"])
    assert "as given" in said[0]


def test_an_answer_ends_with_the_context_and_a_question_that_fills_it_is_left_out(folder, tmp_path):
    context = json.loads((folder / "target" / "config.json").read_text())["max_position_embeddings"]
    rows = [{"id": "short", "prompt": "Do it"}, {"id": "long", "prompt": "Do it " * context}]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    said, told, out = [], [], tmp_path / "answers.jsonl"
    options = dataclasses.replace(OPTIONS, max_tokens=10 * context)
    counts = run_responses(
        prompts, folder / "target", out, options,
        device="cpu", drafter=None, is_given=False, report=said.append,
        echo=lambda kind, values: told.append((values["answered"], values["of"])),
    )  # fmt: skip
    assert told[-1] == (1, 2)
    assert counts == {"documents": 1, "resumed": 0, "left_out": 1}
    (document,) = [json.loads(line) for line in out.read_text().splitlines()]
    assert document["id"] == "short"
    assert len(document["input_ids"]) == context or document["finish_reason"] == "stop"
    assert said == [f"1 left out: their questions do not fit the context of {context} tokens"]


def test_answers_are_told_as_they_come_and_not_by_the_batch(folder, tmp_path):
    told, out = [], tmp_path / "answers.jsonl"
    begun = (folder / "answers.jsonl").read_text().splitlines(keepends=True)[:3]
    out.write_text("".join(begun))
    out.with_name("answers.jsonl.meta.json").write_text((folder / "answers.jsonl.meta.json").read_text())
    run_responses(
        folder / "prompts.jsonl", folder / "target", out, OPTIONS, device="cpu", drafter=None, is_given=False,
        report=print, echo=lambda kind, values: told.append((kind, values)),
    )  # fmt: skip
    assert {kind for kind, _ in told} == {"answers"}
    answered = [values["answered"] for _, values in told]
    assert answered == sorted(answered)
    assert len(set(answered)) > 3  # three batches of four, or what is left
    assert (told[-1][1]["answered"], told[-1][1]["of"], told[-1][1]["eta_s"]) == (12, 12, 0)


def test_a_file_without_answers_does_not_bind_the_next_run(folder, tmp_path):
    out = tmp_path / "answers.jsonl"
    out.write_text("")
    (tmp_path / "answers.jsonl.meta.json").write_text('{"target_sha256": "of an earlier try"}')
    assert answer(folder, out)["documents"] == 12
    assert (
        json.loads((tmp_path / "answers.jsonl.meta.json").read_text())["target_sha256"] != "of an earlier try"
    )


def test_a_run_leaves_prompts_to_measure_on_and_the_calibration_in_log_and_page(folder, tmp_path):
    figures = train(folder, tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "out" / "held_out.jsonl").read_text().splitlines()]
    documents = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    ids = {document["id"]: document["input_ids"] for document in documents}
    masks = {document["id"]: document["loss_mask"] for document in documents}
    tokenizer = Tokenizer.from_dir(folder / "target")
    assert len(rows) == 2
    for row in rows:
        assert tokenizer.encode(row["prompt"]) == ids[row["id"]][: masks[row["id"]].index(1)]
    assert len(load_prompts(str(tmp_path / "out" / "held_out.jsonl")).prompts) == 2
    events = [json.loads(line) for line in (tmp_path / "out" / "train_log.jsonl").read_text().splitlines()]
    assert events[-1]["event"] == "calibration"
    assert {name: events[-1][name] for name in ("ece_before", "ece_after")}.items() <= figures.items()
    page = (tmp_path / "out" / "curves.html").read_text()
    assert "confidences as written, calibration error" in page
    assert "not finished" not in page
