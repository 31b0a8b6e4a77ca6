"""`onward chat`, `infer --prompt` and `evaluate` of a language model: from a published folder to a conversation."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import onward
from onward.cli.app import app

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import language_model
import ready_made

SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'system' %}w1 {% elif m['role'] == 'user' %}w2 {% else %}w3 {% endif %}"
    "{{ m['content'] }} {% endfor %}{% if add_generation_prompt %}w3 {% endif %}"
)


def run(*arguments: Any, text: str = "", fails: bool = False) -> Any:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], input=text)
    assert (result.exit_code != 0) is fails, result.output
    return result


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat") / "base"
    ready_made.write_base(folder, SIZES, language_model.words(96))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def test_a_published_folder_and_a_file_become_a_chat(base: Path, tmp_path: Path) -> None:
    turns = [("w10", "w20 w21"), ("w11", "w30 w31")]
    lines = [
        {"messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": say}]}
        for ask, say in turns
    ]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, lines * 15)))
    (tmp_path / "held-out.jsonl").write_text("\n".join(map(json.dumps, lines)))
    made = run(
        "finetune", base, "--data", tmp_path / "chat.jsonl", "-o", tmp_path / "assistant", "--no-merge",
        "--epochs", 2, "--lr", 0.02, "--eval-data", tmp_path / "held-out.jsonl", "--run", tmp_path / "run",
        "--adapters", tmp_path / "more" / "second.onnx_adapter",
    )  # fmt: skip
    assert f"next: onward chat {tmp_path / 'assistant'}" in made.output
    assert "perplexity" in made.output
    # the report has answers to held-out prompts, beside what they should be
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Answers to held-out prompts" in page and "w20 w21" in page
    options = ("--max-new-tokens", 2)
    talk = run("chat", tmp_path / "assistant", *options, text="w10\n\n/new\nw11\n/end\nw12\n")
    assert talk.stdout.splitlines() == ["w20 w21", "w30 w31"]
    document = json.loads(
        run("chat", tmp_path / "assistant", *options, "--json", "--system", "w5", text="w10\nw11\n").stdout
    )
    roles = [message["role"] for message in document["messages"]]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    # the same base with another file of adapters
    other = run("chat", tmp_path / "assistant", "--adapter", tmp_path / "more" / "second.onnx_adapter", *options,
                text="w10\n")  # fmt: skip
    assert other.stdout.splitlines() == ["w20 w21"]
    # what is no adapter, and what is no command, do not end the conversation
    typed = "/use painter\n/help\nw10\n/use\nw10\n"
    swapped = run("chat", tmp_path / "assistant" / "model.onnx", *options, text=typed)
    lines = swapped.stdout.splitlines()
    assert lines[0] == "w20 w21" != lines[1] and len(lines) == 2
    assert "no adapter 'painter'" in swapped.stderr and "there are /new" in swapped.stderr
    refused = run("chat", base, "--adapter", "poet", text="w10\n", fails=True)
    assert "no place for adapters" in refused.output


def test_a_long_conversation_forgets_its_beginning(base: Path) -> None:
    long = " ".join(f"w{10 + n}" for n in range(25))
    talk = run("chat", base, "--max-new-tokens", 1, text=f"{long}\n{long}\n{long}\n")
    assert len(talk.stdout.splitlines()) == 3 and "its first question is forgotten" in talk.stderr
    whole = run("chat", base, text=f"{long} {long} {long}\n", fails=True)
    assert "the prompt is longer than the 64 tokens that the model reads" in whole.output
    prompt = run("infer", base, "--prompt", f"{long} {long} {long}", fails=True)
    assert prompt.stdout == "" and "longer than the 64 tokens" in prompt.stderr


def test_prompts_are_continued_with_the_options_of_text(base: Path) -> None:
    def texts(*options: Any) -> list[str]:
        arguments = ("infer", base, "--prompt", "w9 w8", "--prompt", "w1 w2", "--max-new-tokens", 6, "--json")
        return json.loads(run(*arguments, *options).stdout)["texts"]

    model: Any = onward.load(base)
    greedy = model(["w9 w8", "w1 w2"], max_new_tokens=6)
    assert texts() == greedy == texts("--temperature", 0)
    drawn = texts("--temperature", 3, "--seed", 1)
    assert drawn == texts("--temperature", 3, "--seed", 1) != greedy
    assert texts("--temperature", 3, "--seed", 1, "--top-k", 1) == greedy
    word = greedy[0].split()[2]
    assert texts("--stop", word)[0] == greedy[0][: greedy[0].index(word)]
    shown = run("infer", base, "--prompt", "w9 w8", "--max-new-tokens", 6)
    assert shown.stdout.strip() == f"w9 w8{greedy[0]}".strip()
    assert "for --prompt" in run("infer", base, "--text", "w1", "--seed", 1, fails=True).output


def test_evaluate_gives_perplexity_or_the_accuracy_in_multiple_choice(base: Path, tmp_path: Path) -> None:
    model: Any = onward.load(base)
    answers = {prompt: model(prompt, max_new_tokens=1) for prompt in map("w9 w{}".format, range(20, 30))}
    prompts = [prompt for prompt, answer in answers.items() if answer][:3]
    likeliest = [f" {answers[prompt].strip()}" for prompt in prompts]
    rows: list[dict[str, Any]] = [
        {"prompt": prompt, "choices": [" w90", word, " w91"], "answer": 1}
        for prompt, word in zip(prompts, likeliest)
    ]
    rows[2]["answer"] = " w90"  # as text, and wrong
    path = tmp_path / "choices.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    figures = json.loads(run("evaluate", base, "--data", path, "--json").stdout)
    assert figures["accuracy"] == figures["accuracy by mean"] == pytest.approx(2 / 3)
    assert figures["samples"] == 3
    (tmp_path / "texts.jsonl").write_text('{"text": "w1 w2 w3"}\n{"prompt": "w1", "completion": " w2"}\n')
    figures = json.loads(run("evaluate", base, "--data", tmp_path / "texts.jsonl", "--json").stdout)
    assert figures["perplexity"] == pytest.approx(2.718281828 ** figures["loss"])
    rows[1]["answer"] = 7
    path.write_text("\n".join(map(json.dumps, rows)))
    wrong = run("evaluate", base, "--data", path, fails=True)
    assert f"'{path}' line 2: the answer is '7', and must be one of the choices" in wrong.output


def test_what_cannot_converse_says_so(base: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    ready_made.write_base(plain, SIZES, language_model.words(96))
    assert "no chat template" in run("chat", plain, text="w1\n", fails=True).output
    (tmp_path / "lines.jsonl").write_text('{"text": "w1 w2"}\n')
    made = run("finetune", plain, "--data", tmp_path / "lines.jsonl", "-o", tmp_path / "out")
    assert f"next: onward infer {tmp_path / 'out'} --prompt" in made.output
