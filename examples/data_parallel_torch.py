"""Train a small torch model on every device of this process, with one group of all-reduces per step.

On a machine with GPUs the models are on the GPUs and NCCL moves the gradients. Without GPUs, choose the host engine
with NCCLPY_LIBRARY=host: the models are then in CPU memory, and the program is the same.
"""

import torch

import ncclpy

on_gpus = ncclpy.library().engine == "cuda"
count = min(4, torch.cuda.device_count() if on_gpus else ncclpy.device_count())
devices = [f"cuda:{ordinal}" if on_gpus else "cpu" for ordinal in range(count)]
comms = ncclpy.Communicator.init_all(range(count))

torch.manual_seed(0)
inputs, targets = torch.randn(64 * count, 8), torch.randn(64 * count, 1)
parts = [(x.to(d), y.to(d)) for d, x, y in zip(devices, inputs.chunk(count), targets.chunk(count), strict=True)]


def make_model(device: str) -> torch.nn.Module:
    torch.manual_seed(1)  # the same weights everywhere
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).to(device)


models = [make_model(device) for device in devices]
optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
losses = []
for _ in range(20):
    step = []
    for model, (x, y) in zip(models, parts, strict=True):
        model.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        step.append(loss.detach())
    with ncclpy.group():  # all devices and layers: one launch for each device, on torch's current streams
        for comm, model in zip(comms, models, strict=True):
            for parameter in model.parameters():
                comm.all_reduce(parameter.grad, op="avg")
    for optimizer in optimizers:
        optimizer.step()
    losses.append(sum(each.item() for each in step) / count)

first = [parameter.detach().cpu() for parameter in models[0].parameters()]
for model in models[1:]:
    for mine, theirs in zip(first, model.parameters(), strict=True):
        assert torch.allclose(mine, theirs.detach().cpu(), atol=1e-6), "models have come apart"
assert losses[-1] < losses[0], losses
print(f"{count} devices, loss fell: {losses[-1] < losses[0]}")
for comm in comms:
    comm.close()
