# SPDX-License-Identifier: Apache-2.0
"""Train a translation model on two text files, whose lines belong together, and see what it says:

    python examples/train.py train.en train.de          into a new folder `run`

Without files it learns to say lines backwards, in some ten seconds. The last hundredth of the lines
is held out, for validation. It ends when that gets no better; Ctrl-C ends it too, saves, and what it
has learned is shown. `relpos train` does all of this and more.
"""

import random
import sys
import tempfile
from pathlib import Path

import relpos

if len(sys.argv) > 1:
    source, target = sys.argv[1:]
    pairs, folder = list(relpos.data.read_pairs(source, target)), Path("run")
    config, subwords = relpos.Config.preset("small"), None  # pieces of words, learned from the text
else:
    random.seed(1)
    words = [a + b for a in "bdfgk" for b in "aeiou"]
    lines = [random.choices(words, k=random.randint(1, 8)) for _ in range(4000)]
    pairs = [(" ".join(line), " ".join(line[::-1])) for line in lines]
    config, subwords = relpos.Config.preset("tiny"), relpos.data.Words(words)
    config = config.replace({"learning_rate": 0.003, "warmup": 100, "steps": 400})
    folder = Path(tempfile.mkdtemp()) / "run"

held = max(len(pairs) // 100, 1)
trainer = relpos.Trainer(
    config,  # .replace({"encoder.k": 8, "dropout": 0.3}) and so on: docs/presets.md
    pairs[:-held],
    folder=folder,
    validation=pairs[-held:],
    subwords=subwords,
    tokens=1024 if subwords else 4096,
    validate_every=200,
    patience=5,
    progress="auto",
)
print(trainer.train())

translator = relpos.Translator.load(folder)
sources, references = zip(*pairs[-5:], strict=True)
for source, said, reference in zip(sources, translator.translate(sources), references, strict=True):
    print(f"{source}\n    {said}\n    {'right' if said == reference else reference}")
