"""Without torch: the same answers as with it, from Python, the command line and the service; errors where it is needed.

In an environment that has only what `infinilm[serve,structured]` requires, and the test tools: `lean_environment.py`.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from lean_environment import ROOT, clean_environment, make_environment

TEST_TOOLS = ("pytest", "pytest-timeout", "httpx", "openai", "jsonschema", "hypothesis")
TESTS = (
    "tests/server/test_serve_smollm2.py",
    "tests/server/test_admission.py",
    "tests/engine/test_block_manager.py",
    "tests/test_framing.py",
    "tests/test_settings.py",
)
"""Those that need no torch; they are run with it, too."""

ANSWERS = """
import dataclasses, json, sys
from infinilm import LLM, SamplingParams, StructuredOutput

PROMPTS = ["The capital of France is", "def fib(n):", "1, 1, 2, 3, 5, 8,"]
CHOICE = StructuredOutput(regex="(red|green) [0-9]{3}")
PARAMS = [
    {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 2},
    {"seed": 1, "temperature": 0.9, "top_k": 40, "top_p": 0.9, "n": 2},
    {"seed": 2, "min_p": 0.05, "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    {"seed": 3, "logit_bias": {260: 3.0, 30: -100.0}, "stop": [","], "min_tokens": 3},
    {"seed": 4, "structured": CHOICE},
]
with LLM(max_model_len=512, num_kvcache_blocks=24, max_num_batched_tokens=16) as llm:
    pairs = [(prompt, SamplingParams(max_tokens=12, **params)) for params in PARAMS for prompt in PROMPTS]
    outputs = llm.generate(*map(list, zip(*pairs)), use_tqdm=False)
    print(json.dumps([[dataclasses.asdict(each) for each in output.outputs] for output in outputs]))
    print(json.dumps([repr(output.prompt_logprobs) for output in outputs]))
print("torch" in sys.modules)
"""

NEEDS_TORCH = {
    "InferEngine": "from infinilm import InferEngine; InferEngine",
    "hooks": "import infinilm.debug",
    "dense weights": "from infinilm import LLM; LLM(quantization='none')",
    "several ranks": "from infinilm import LLM; LLM(tensor_parallel_size=2)",
    "a GPU": "from infinilm import LLM; LLM(device='cuda')",
}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lean") / "venv"
    return make_environment(folder, extras=("serve", "structured"), also=TEST_TOOLS)


def run(python: Path | str, *arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = clean_environment() | {"OMP_NUM_THREADS": "1"}
    return subprocess.run([python, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def test_there_is_no_torch(python: Path) -> None:
    found = run(python, "-c", "import importlib.util as u; print(u.find_spec('torch'), u.find_spec('triton'))")
    assert found.stdout == "None None\n", found.stderr


def test_answers_are_those_with_torch_installed(python: Path, smollm2: Path) -> None:
    alone, beside = (run(each, "-c", ANSWERS) for each in (python, sys.executable))
    *answers, imports_torch = alone.stdout.splitlines()
    assert alone.returncode == beside.returncode == 0, alone.stderr + beside.stderr
    assert len(json.loads(answers[0])) == 15
    assert answers == beside.stdout.splitlines()[:-1]
    assert imports_torch == "False"


def test_the_command_line(python: Path, smollm2: Path) -> None:
    done = run(
        python, "-m", "infinilm", "generate", "--max-tokens", "3", "--temperature", "0", "The capital of France is"
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    done = run(python, "-m", "infinilm", "info")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("what", NEEDS_TORCH)
def test_what_needs_torch_says_so(python: Path, what: str, smollm2: Path) -> None:
    done = run(python, "-c", NEEDS_TORCH[what])
    assert done.returncode == 1
    assert "pip install 'infinilm[torch]'" in done.stderr.splitlines()[-1], done.stderr


def test_the_tests_that_need_none_pass(python: Path, smollm2: Path) -> None:
    options = ("-m", "pytest", "-p", "no:cacheprovider", "--override-ini=addopts=", "-q")
    done = run(python, *options, *TESTS)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "skipped" not in done.stdout.splitlines()[-1]
