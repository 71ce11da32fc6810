"""Which engines serve which target: the table, its page, and the script that reads the engines."""

import io
import tarfile
import zipfile
from pathlib import Path

import pytest

from scripts import engine_targets as script
from spec_data.models.engines import engine_warnings, engines, served
from spec_data.models.families import TARGETS

BLOCKS = ("dspark", "dflash")


def test_the_table_of_the_page_is_what_the_packages_say() -> None:
    page = script.PAGE.read_text(encoding="utf-8")
    assert script.page_with_table(page) == page
    assert (
        script.page_with_table(
            page.replace("| all | all |", "| none | all |").replace("SGLang 0", "SGLang 9")
        )
        == page
    )


@pytest.mark.parametrize(
    ("engine", "draft", "architecture", "answer"),
    [
        ("vllm", "eagle3", "Qwen3ForCausalLM", True),
        ("vllm", "dspark", "MixtralForCausalLM", False),
        ("vllm", "eagle", "MixtralForCausalLM", True),
        ("vllm", "eagle3", "Exaone4ForCausalLM", False),  # seen: "does not support EAGLE3"
        ("vllm", "peagle", "Gemma3ForCausalLM", False),
        ("vllm-cpu", "eagle3", "GraniteMoeForCausalLM", False),
        ("vllm", "eagle3", "NobodysForCausalLM", None),
        ("sglang", "eagle3", "Gemma3ForCausalLM", True),
        ("sglang", "eagle3", "Cohere2ForCausalLM", False),
        ("sglang", "dflash", "GraniteForCausalLM", False),
        ("sglang", "dspark", "Gemma4ForCausalLM", False),  # scales what block drafts look up
        ("sglang", "eagle3", "Gemma4ForCausalLM", True),
        ("llama.cpp", "eagle3", "Qwen2ForCausalLM", False),  # seen: GGML_ASSERT, exit 134
        ("llama.cpp", "dflash", "Olmo2ForCausalLM", False),  # seen
        ("llama.cpp", "eagle3", "LlamaForCausalLM", True),
    ],
)
def test_what_releases_are_known_to_serve(
    engine: str, draft: str, architecture: str, answer: bool | None
) -> None:
    assert served(engine, draft, [architecture]).answer is answer


def test_unknown_is_never_a_yes() -> None:
    for draft in ("eagle", "eagle3", *BLOCKS):
        for names in ([], ["NobodysForCausalLM"]):
            assert served("sglang", draft, names).answer is None
    warned = engine_warnings(["eagle3", "dspark"], ["Exaone4ForCausalLM"])
    assert len(warned) == 4 and all("cannot serve Exaone4ForCausalLM" in text for text in warned)
    assert "eagle3, dspark" in warned[0]
    assert engine_warnings(list(BLOCKS), ["Qwen3ForCausalLM"]) == []


def test_most_registered_targets_are_known() -> None:
    """A release that renames its tables would leave every target unknown."""
    for engine in script.READERS:
        answers = [served(engine, "eagle3", [name]).answer for name in TARGETS]
        assert answers.count(True) >= 15 and answers.count(False) >= 15


def _wheel(path: Path, files: dict[str, str]) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)


def _sdist(path: Path, files: dict[str, str]) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"package-1/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))


def test_the_script_reads_a_class_through_its_ancestors(tmp_path: Path) -> None:
    """Of vLLM: by a mixin of another module, by a package, and not at all; nothing is imported."""
    models = "vllm/model_executor/models"
    _wheel(
        tmp_path / "vllm-1.whl",
        {
            f"{models}/registry.py": '_TEXT_GENERATION_MODELS = {"A": ("a", "A"), "B": ("b", "B"), '
            '"C": ("vllm.models.c", "C")}\n_SPECULATIVE_DECODING_MODELS = {"D": ("a", "A")}',
            f"{models}/a.py": "from .base import Base as Other\nclass A(Other): pass\n1 / 0",
            f"{models}/base.py": "from .interfaces import SupportsEagle3\n"
            "class Base(SupportsEagle3): pass",
            f"{models}/b.py": "class B: pass",
            "vllm/models/c/__init__.py": "if cuda():\n    from .nvidia.model import X as C",
            "vllm/models/c/nvidia/model.py": "from vllm.model_executor.models.base import Base\n"
            "class X(Base): pass",
        },
    )
    found = script.vllm(script.Sources(tmp_path / "vllm-1.whl", script.READERS["vllm"][1]))
    assert found == {"known": {"A", "B", "C"}, "aux": {"A", "C"}, "drafts": {"D"}}


def test_the_script_reads_methods_and_graphs(tmp_path: Path) -> None:
    models = "sglang/srt/models"
    _wheel(
        tmp_path / "sglang-1.whl",
        {
            f"{models}/a.py": "class A:\n    def set_eagle3_layers_to_capture(self): ...\n"
            "    def get_embed_and_head(self): ...\nclass A2(A): pass\nEntryClass = [A, A2]",
            f"{models}/b.py": "class B:\n    def set_dspark_layers_to_capture(self): ...\n"
            "EntryClass = B",
            f"{models}/c.py": "from sglang.srt.models.b import B\n"
            "from sglang.srt.models.d import D\nclass C(B): pass\nEntryClass = C",
            f"{models}/d.py": "class D:\n    embed_tokens = ScaledWordEmbedding(3)",
            "sglang/srt/configs/model_config.py": "BOTH = ('A2', 'Z')\ndef load():\n"
            "    if is_draft_model and config.architectures[0] in BOTH:\n"
            "        config.architectures[0] = 'A2MTP'\n"
            "    if is_draft_model and config.architectures[0] == 'B':\n"
            "        config.architectures = ['BMTP']\n"
            "    if is_draft_model and config.architectures[0] == 'C':\n"
            "        config = other(config)\n"
            "    if config.architectures[0] == 'A':\n        config.architectures[0] = 'X'\n",
        },
    )
    found = script.sglang(script.Sources(tmp_path / "sglang-1.whl", script.READERS["sglang"][1]))
    assert found == {
        "known": {"A", "A2", "B", "C"},
        "aux": {"A", "A2"},
        "head": {"A", "A2"},
        "dspark": {"B", "C"},
        "dflash": set(),
        "rows": {"B"},
        "nextn": {"A2", "B"},
        "drafts": set(),
    }
    root = "vendor/llama.cpp"
    version = engines().engine["llama.cpp"].release.split()[1].split(".")
    _sdist(
        tmp_path / "llama-1.tar.gz",
        {
            f"{root}/CMakeLists.txt": "\n".join(
                f"set(LLAMA_VERSION_{name} {number})"
                for name, number in zip(("MAJOR", "MINOR", "PATCH"), version, strict=True)
            ),
            f"{root}/src/llama-model.cpp": "".join(
                f"case LLM_ARCH_{name.upper()}:\n  return new llama_model_{name}(params);\n"
                for name in ("one", "two", "three")
            ),
            f"{root}/src/llama-arch.cpp": '{ LLM_ARCH_ONE, "one" }, { LLM_ARCH_TWO, "two" }, '
            '{ LLM_ARCH_THREE, "three" }',
            f"{root}/src/models/models.h": "struct llama_model_three : public base {\n"
            "    using graph = llama_model_one::graph;\n};\n",
            f"{root}/src/models/one.cpp": "llama_model_one::graph::graph(int) {\n"
            "  res->t_layer_inp[il] = inpL;\n}",
            f"{root}/src/models/two.cpp": "llama_model_two::graph::graph(int) {}\n"
            "llama_model_two::graph_mtp::graph_mtp(int) {}",
            f"{root}/gguf-py/gguf/constants.py": 'NAMES = {MODEL_ARCH.ONE: "one", '
            'MODEL_ARCH.TWO: "two", MODEL_ARCH.THREE: "three"}',
            f"{root}/conversion/a.py": "".join(
                f'@ModelBase.register("{name}ForCausalLM")\nclass {name}(TextModel):\n'
                f"    model_arch = gguf.MODEL_ARCH.{name.upper()}\n"
                f"    supports_mtp_export = {name != 'Three'}\n"
                for name in ("One", "Two", "Three")
            )
            + '@ModelBase.register("EitherForCausalLM")\nclass Either(One):\n'
            "    def prepare(self):\n        self.model_arch = gguf.MODEL_ARCH.TWO\n"
            '@ModelBase.register("MixedForCausalLM")\nclass Mixed(Unknown, Two):\n    pass\n'
            '@ModelBase.register("NoForCausalLM")\nclass No(Two):\n'
            "    supports_mtp_export = False\n",
        },
    )
    found = script.llama_cpp(
        script.Sources(tmp_path / "llama-1.tar.gz", script.READERS["llama.cpp"][1])
    )
    assert found == {
        "known": {f"{name}ForCausalLM" for name in ("One", "Two", "Three", "Mixed", "No")},
        "aux": {"OneForCausalLM", "ThreeForCausalLM"},
        "mtp": {"TwoForCausalLM", "MixedForCausalLM"},
        "drafts": set(),
    }
