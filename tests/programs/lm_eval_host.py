"""The program of compat/test_lm_eval_host.py in lm-eval's own environment: tasks on several models.

Input: a JSON file, {"url", "model", "hf", "folder"}: a server, its model, the same weights as a
Hugging Face folder, and a working folder. It makes local data and three tasks. Output: results.json
in that folder, {model: {task: {"metrics", "samples"}}}. Nothing is downloaded.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}

import lm_eval
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

_WORDS = "cat dog bird tree ball house river apple girl boy friend garden".split()
_COMMON = """dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
task: {name}
"""
_CHOICE = """output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_target: "{{label}}"
doc_to_choice: "{{choices}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
_SCORE = """output_type: loglikelihood
doc_to_text: "{{context}}"
doc_to_target: " {{choices[label]}}"
metric_list: [{metric: perplexity}, {metric: acc}]
"""
_WRITE = """output_type: generate_until
doc_to_text: "{{context}}"
doc_to_target: "{{choices[label]}}"
generation_kwargs: {until: ["\\n", "."], max_gen_toks: 24, do_sample: false}
metric_list: [{metric: exact_match}]
"""
_ROLL = """output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{context}}"
metric_list: [{metric: word_perplexity}]
"""
TASKS = {"choose": _CHOICE, "score": _SCORE, "write": _WRITE, "roll": _ROLL}


def write_tasks(folder: Path) -> None:
    data = folder / "data.jsonl"
    lines = []
    for i in range(40):
        one, other = _WORDS[i % 12], _WORDS[(5 * i + 3) % 12]
        context = f"Once upon a time there was a {one}. The {one} wanted to play with the"
        choices = [other, one, _WORDS[(i + 7) % 12], "🎈 sky"]
        lines.append(json.dumps({"context": context, "choices": choices, "label": i % 3}))
    data.write_text("\n".join(lines))
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(_COMMON.format(data=data, name=name) + text)


def evaluate(folder: Path, model: Any, args: str | None, tasks: list[str], **more: Any) -> Any:
    found = lm_eval.simple_evaluate(
        model=model, model_args=args, tasks=tasks, log_samples=True, bootstrap_iters=0,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False), **more,
    )  # fmt: skip
    return {
        task: {
            "metrics": {k: v for k, v in found["results"][task].items() if isinstance(v, float)},
            "samples": [[s["doc_id"], s["resps"]] for s in found["samples"][task]],
        }
        for task in tasks
    }


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    folder = Path(job["folder"])
    write_tasks(folder)
    hf = HFLM(pretrained=job["hf"], dtype="float32", device="cpu", batch_size=8, add_bos_token=True)
    common = f"model={job['model']},num_concurrent=16,max_retries=3,max_length=512,base_url="
    common += f"{job['url']}/v1/completions"
    own = f",tokenizer={job['hf']},tokenizer_backend=huggingface,add_bos_token=True"
    ways = {
        "ids": f"{common}{own},tokenized_requests=True",
        "text": f"{common}{own},tokenized_requests=False",
        "remote": f"{common},tokenizer_backend=remote,tokenized_requests=True",
    }
    names, template = list(TASKS), {"apply_chat_template": True}
    results = {"hf": evaluate(folder, hf, None, names)}
    for way, args in ways.items():
        # For text, lm-eval's windows for "roll" contain begin_of_text twice: the second is text
        # here.
        tasks = [name for name in names if (way, name) != ("text", "roll")]
        results[way] = evaluate(folder, "local-completions", args, tasks, batch_size=8)
    chat = common.replace("/v1/completions", "/v1/chat/completions")
    results["chat"] = evaluate(folder, "local-chat-completions", chat, ["write"], **template)
    results["hf chat"] = evaluate(folder, hf, None, ["write"], **template)
    hf.add_bos_token = False  # the same request as to a server's tokenizer
    results["hf remote"] = evaluate(folder, hf, None, names)
    (folder / "results.json").write_text(json.dumps(results, default=str))


if __name__ == "__main__":
    main()
