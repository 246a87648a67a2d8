"""A plain DeepSpeed program that trains the demo's model. It has no code for gradient compression.

The README's command runs it with compression, unchanged.
"""

import argparse

import deepspeed
import torch

from powersgd_triton.demo.model import CONTEXT, GPT, next_token_loss, read_corpus, sample_batch


def main() -> None:
    """Train with the arguments of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0, help="given by the launcher")
    parser.add_argument("--steps", type=int, default=20)
    arguments = deepspeed.add_config_arguments(parser).parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT()
    engine, *_ = deepspeed.initialize(args=arguments, model=model, model_parameters=list(model.parameters()))
    worker = torch.distributed.get_rank()
    text, generator = read_corpus()[0], torch.Generator().manual_seed(1 + worker)
    for step in range(1, arguments.steps + 1):
        batch = sample_batch(text, engine.train_micro_batch_size_per_gpu(), CONTEXT, generator)
        inputs, targets = (tokens.to(engine.device) for tokens in batch)
        loss = next_token_loss(engine, inputs, targets)
        engine.backward(loss)
        engine.step()
        if worker == 0 and step % 5 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
