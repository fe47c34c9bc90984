"""Programs of Accelerate, DeepSpeed, Lightning, Fabric, transformers and torchmetrics, as their users write them.

torchrun --nproc-per-node N torch_clients.py CLIENT BACKEND FOLDER: rank 0 prints the numbers that it has computed, as
JSON. Over two backends they are equal.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ON_GPUS = torch.cuda.is_available() and os.environ.get("NCCLPY_LIBRARY") != "host"
STEPS = 12


def data(rows: int = 256) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(rows, 16, generator=generator), torch.randint(0, 4, (rows,), generator=generator))


def made_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))


def made_gpt() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 100, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(**sizes, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0))


def tokens() -> torch.Tensor:
    return torch.randint(0, 100, (128, 32), generator=torch.Generator().manual_seed(1))


def device_of_rank() -> torch.device:
    """Return the device for this rank's tensors, and make it current."""
    if not ON_GPUS:
        return torch.device("cpu")
    device = torch.device("cuda", dist.get_rank())
    torch.cuda.set_device(device)
    return device


def accelerate(backend: str, folder: Path, mode: str) -> list[Any]:
    """Accumulate gradients over two batches, clip them, gather metrics and objects, save and load the state."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, InitProcessGroupKwargs
    from accelerate.utils import broadcast_object_list

    options: dict[str, Any] = {"cpu": True}
    if ON_GPUS:
        options = {"kwargs_handlers": [InitProcessGroupKwargs(backend=backend)], "mixed_precision": "bf16"}
    else:
        dist.init_process_group(backend)
    if mode == "fsdp2":
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["GPT2Block"]
        )
    accelerator = Accelerator(gradient_accumulation_steps=2, **options)
    assert accelerator.is_fsdp2 == (mode == "fsdp2")
    model = made_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(tokens(), batch_size=4))
    found: list[Any] = []
    for _, batch in zip(range(STEPS), loader, strict=False):
        with accelerator.accumulate(model):
            loss = model(batch, labels=batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                found.append(float(norm))
            optimizer.step()
            optimizer.zero_grad()
        found.append(accelerator.reduce(loss.detach(), "mean").item())
    index = torch.tensor([accelerator.process_index], device=accelerator.device)
    found.append(accelerator.gather_for_metrics(index).tolist())
    found.append(accelerator.gather_for_metrics([f"rank {accelerator.process_index}"], use_gather_object=True))
    named = [accelerator.process_index if accelerator.is_main_process else None]
    broadcast_object_list(named)
    accelerator.save_state(str(folder / "state"))
    accelerator.wait_for_everyone()
    accelerator.load_state(str(folder / "state"))
    batch = tokens()[:4].to(accelerator.device)
    found += [named, accelerator.reduce(model(batch, labels=batch).loss.detach(), "mean").item(), dist.get_backend()]
    accelerator.end_training()
    return found


def lightning(backend: str, folder: Path, mode: str) -> list[Any]:
    """Train and validate with metrics that are averaged over the ranks; save a checkpoint and continue from it."""
    import lightning as lightning_package
    from lightning.pytorch.strategies import DDPStrategy

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    seen: list[Any] = []

    class Module(lightning_package.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = made_model()

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            loss = nn.functional.cross_entropy(self.model(batch[0]), batch[1])
            self.log("loss", loss, sync_dist=True)
            seen.append(loss.item())
            return loss

        def validation_step(self, batch: Any, number: int) -> None:
            self.log("val", nn.functional.cross_entropy(self.model(batch[0]), batch[1]), sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.05)

    def fit(module: Module, epochs: int, path: str | None) -> Any:
        trainer = lightning_package.Trainer(
            accelerator="gpu" if ON_GPUS else "cpu",
            devices=int(os.environ["WORLD_SIZE"]),
            strategy=DDPStrategy(process_group_backend=backend),
            max_epochs=epochs,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            accumulate_grad_batches=2,
            gradient_clip_val=1.0,
        )
        trainer.fit(module, DataLoader(data(), 32), DataLoader(data(), 64), ckpt_path=path)
        return trainer

    trainer = fit(Module(), 1, None)
    trainer.save_checkpoint(folder / "one.ckpt")
    trainer = fit(Module(), 2, str(folder / "one.ckpt"))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return [seen, sorted(metrics.items()), dist.get_backend()]


def fabric(backend: str, folder: Path, mode: str) -> list[Any]:
    """Train with Fabric: its backward, its all_gather and all_reduce, its checkpoints."""
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    made = Fabric(
        accelerator="gpu" if ON_GPUS else "cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=DDPStrategy(process_group_backend=backend),
    )
    made.launch()
    model = made_model()
    model, optimizer = made.setup(model, torch.optim.SGD(model.parameters(), 0.05))
    loader = made.setup_dataloaders(DataLoader(data(), 32))
    found: list[Any] = []
    for inputs, targets in loader:
        loss = nn.functional.cross_entropy(model(inputs), targets)
        made.backward(loss)
        made.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        found += [made.all_reduce(loss.detach(), reduce_op="mean").item(), made.all_gather(loss.detach()).tolist()]
    made.save(folder / "fabric.ckpt", {"model": model})
    made.barrier()
    made.load(folder / "fabric.ckpt", {"model": model})
    return [*found, made.broadcast({"from": made.global_rank}), dist.get_backend()]


def transformers(backend: str, folder: Path, mode: str) -> list[Any]:
    """Train, evaluate and save with the Trainer."""
    from transformers import Trainer, TrainingArguments

    options: dict[str, Any] = {"ddp_backend": backend} if ON_GPUS else {"use_cpu": True}
    if not ON_GPUS:
        dist.init_process_group(backend)
    rows = [{"input_ids": row, "labels": row} for row in tokens()]
    arguments = TrainingArguments(
        output_dir=str(folder / "out"),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=6,
        save_steps=6,
        report_to=[],
        disable_tqdm=True,
        seed=0,
        **options,
    )
    trainer = Trainer(made_gpt(), arguments, train_dataset=rows, eval_dataset=rows[:32])
    done = trainer.train()
    names = ("loss", "eval_loss", "grad_norm")
    logged = [[entry.get(name) for name in names] for entry in trainer.state.log_history]
    return [done.training_loss, logged, trainer.evaluate()["eval_loss"], dist.get_backend()]


def torchmetrics(backend: str, folder: Path, mode: str) -> list[Any]:
    """Metrics that are summed, averaged, concatenated and computed over all ranks."""
    from torchmetrics import CatMetric, MaxMetric, MeanMetric
    from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

    dist.init_process_group(backend)
    rank, device = dist.get_rank(), device_of_rank()
    predicted = torch.randn(20 + rank, 4, generator=torch.Generator().manual_seed(rank)).to(device)
    targets = (torch.arange(20 + rank) % 4).to(device)
    metrics = [MeanMetric(), MaxMetric(), CatMetric(), MulticlassAccuracy(4), MulticlassConfusionMatrix(4)]
    for metric in metrics:
        metric.to(device).update(*([predicted, targets] if "Multiclass" in type(metric).__name__ else [predicted]))
    return [*(metric.compute().tolist() for metric in metrics), dist.get_backend()]


def deepspeed(backend: str, folder: Path, mode: str) -> list[Any]:
    """Train with ZeRO: accumulated and clipped gradients, a checkpoint, and a step after it has been loaded."""
    if not ON_GPUS:
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed as deepspeed_package
    from deepspeed import comm

    deepspeed_package.init_distributed(dist_backend=backend)
    rank, device = dist.get_rank(), device_of_rank()
    model = made_model()
    engine, *_ = deepspeed_package.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 8,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            "zero_optimization": {"stage": int(mode.removeprefix("zero"))},
        },
    )
    generator = torch.Generator().manual_seed(5 + rank)
    found: list[Any] = []

    def step() -> None:
        inputs = torch.randn(8, 16, generator=generator).to(device)
        targets = torch.randint(0, 4, (8,), generator=generator).to(device)
        loss = nn.functional.cross_entropy(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        comm.all_reduce(total)
        found.append(total.item())

    for _ in range(STEPS):
        step()
    engine.save_checkpoint(str(folder))
    engine.load_checkpoint(str(folder))
    for _ in range(2):
        step()
    return [*found, dist.get_backend()]


CLIENTS = {
    "accelerate-ddp": accelerate,
    "accelerate-fsdp2": accelerate,
    "lightning-ddp": lightning,
    "fabric-ddp": fabric,
    "transformers-ddp": transformers,
    "torchmetrics-none": torchmetrics,
    "deepspeed-zero0": deepspeed,
    "deepspeed-zero1": deepspeed,
    "deepspeed-zero2": deepspeed,
    "deepspeed-zero3": deepspeed,
}


def main(client: str, backend: str, folder: str) -> None:
    """Run a client; the last number is the backend's name, which is checked here."""
    warnings.filterwarnings("ignore")
    if backend == "ncclpy":
        import ncclpy.interop.torch  # noqa: F401
    *found, name = CLIENTS[client](backend, Path(folder), client.partition("-")[2])
    assert name == backend, name
    if int(os.environ["RANK"]) == 0:
        print("NUMBERS", json.dumps(found), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
