"""A small model of OLMoE's class, trained for minutes on your text files, to capture, report and operate on.

    python tests/external/small_olmoe.py --text=de.txt --text=en.txt --out=small --steps=600

leaves checkpoints of transformers with their tokenizer in OUT/step_N: one at a quarter of the steps, and the last. Then

    routed trace capture --model=small/step_600 --text=... --out=trace;  routed trace report trace
    routed trace surgery --model=small/step_600 --text=... --out=surgery

Needs torch and transformers 5 (pip install 'routed[torch]').
"""

import argparse
import pathlib
import time

import numpy as np
import tokenizers
import torch
import transformers

VOCABULARY, LENGTH, BATCH, RATE = 4096, 128, 16, 3e-3


def tokenizer_of(paths):
    """Byte pairs, learned from the text."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    made.train([str(path) for path in paths], trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made)


def model_of(experts=16, k=4, layers=4, width=128):
    """An untrained one: OLMoE's class and settings, in small."""
    return transformers.OlmoeForCausalLM(
        transformers.OlmoeConfig(
            vocab_size=VOCABULARY, hidden_size=width, intermediate_size=width, num_hidden_layers=layers,
            num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=512, num_experts=experts,
            num_experts_per_tok=k, router_aux_loss_coef=0.01, output_router_logits=True, pad_token_id=None,
            eos_token_id=None, bos_token_id=None,
        )
    )  # fmt: skip


def train(paths, out, steps, seed=0):
    """Trains on rows drawn from all files, each file alike, and returns the folder of the last checkpoint."""
    torch.manual_seed(seed)
    random, tokenizer = np.random.default_rng(seed), tokenizer_of(paths)
    texts = [np.asarray(tokenizer(path.read_text("utf-8"))["input_ids"], np.int64) for path in paths]
    print(f"{sum(map(len, texts)):,} tokens in {len(texts)} files", flush=True)
    model = model_of()
    adam = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    warm = min(50, steps // 4)
    rate = torch.optim.lr_scheduler.LambdaLR(
        adam, lambda step: min((step + 1) / warm, 0.1 + 0.45 * (1 + np.cos(np.pi * step / steps)))
    )
    begun = time.monotonic()
    for step in range(1, steps + 1):
        rows = []
        for _ in range(BATCH):
            text = texts[random.integers(len(texts))]
            first = random.integers(len(text) - LENGTH)
            rows.append(text[first : first + LENGTH])
        ids = torch.from_numpy(np.stack(rows))
        loss = model(input_ids=ids, labels=ids).loss
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        rate.step()
        if step % 50 == 0:
            print(f"step {step} of {steps}, loss {loss.item():.3f}, {time.monotonic() - begun:.0f} s", flush=True)
        if step in (steps // 4, steps):
            folder = out / f"step_{step}"
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=pathlib.Path, action="append", required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print(f"left {train(given.text, given.out, given.steps, given.seed)}")
