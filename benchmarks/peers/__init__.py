"""Other engines that `bench --peer` compares with on a CPU. Each runs in its own process."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from types import MappingProxyType

from infinilm.errors import EngineError

OURS = "infinilm"
LLAMA_CPP = "llama.cpp"
OPENVINO = "openvino"


@dataclass(frozen=True, slots=True)
class PeerPackage:
    """The package of an engine, and how a user would start it."""

    package: str
    module: str
    start: str
    """A program that prints the first token, given a file, a number of threads and a prompt."""


PEERS: Mapping[str, PeerPackage] = MappingProxyType(
    {
        LLAMA_CPP: PeerPackage(
            "llama-cpp-python",
            "llama_cpp",
            """
import sys
from llama_cpp import Llama
model = Llama(sys.argv[1], n_threads=int(sys.argv[2]), n_threads_batch=int(sys.argv[2]), verbose=False)
for piece in model(sys.argv[3], max_tokens=1, temperature=0.0, stream=True):
    print(piece["choices"][0]["text"], end="", flush=True)
""",
        ),
        OPENVINO: PeerPackage(
            "openvino-genai",
            "openvino_genai",
            """
import sys
from openvino_genai import LLMPipeline
model = LLMPipeline(sys.argv[1], "CPU", INFERENCE_NUM_THREADS=int(sys.argv[2]))
print(model.generate(sys.argv[3], max_new_tokens=1, do_sample=False), flush=True)
""",
        ),
    }
)


def check_installed(peer: str) -> None:
    if find_spec(PEERS[peer].module) is None:
        raise EngineError(
            f"comparing with {peer} needs {PEERS[peer].package}; install it with: pip install 'infinilm[peers]'"
        )
