"""Train a tiny model with the trainer of sentence-transformers."""

import argparse
import tempfile
import time
from pathlib import Path

from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import CoSENTLoss
from sentence_transformers.models import Pooling, Transformer
from transformers import BertConfig, BertModel, BertTokenizer, TrainerCallback

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "dog", "cat", "runs", "sleeps"]


class Slow(TrainerCallback):
    def on_step_end(self, *_: object, **__: object) -> None:
        time.sleep(0.1)


def make_model(folder: Path) -> SentenceTransformer:
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    BertModel(BertConfig(vocab_size=len(WORDS), **sizes)).save_pretrained(folder)
    words = Transformer(str(folder))
    return SentenceTransformer(modules=[words, Pooling(8)], device="cpu")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.001)
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder))
    pairs = {"sentence1": ["a dog runs"] * 16, "sentence2": ["a cat sleeps"] * 16, "score": [0.25, 0.75] * 8}
    training = SentenceTransformerTrainingArguments(
        "output",
        max_steps=arguments.steps,
        learning_rate=arguments.lr,
        per_device_train_batch_size=4,
        logging_steps=5,
        use_cpu=True,
    )
    trainer = SentenceTransformerTrainer(
        model, training, train_dataset=Dataset.from_dict(pairs), loss=CoSENTLoss(model), callbacks=[Slow()]
    )
    trainer.train()


if __name__ == "__main__":
    main()
