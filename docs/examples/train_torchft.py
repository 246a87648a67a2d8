"""Train with workers that come and go: python train_torchft.py. One of three is killed, and another takes its place."""

import datetime
import multiprocessing
import os
import signal
import socket
import time

import torch
import torch.distributed as dist
import torchft
import torchft.checkpointing.http_transport as http
import torchft.manager
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchft.coordination import LighthouseServer
from torchft.process_group import ProcessGroupDummy, ProcessGroupGloo

from powersgd_triton import attach

ADDRESS = "127.0.0.1"
STEPS, FATAL = 400, 50
SECONDS = datetime.timedelta(seconds=20)


def listen_on(address: str) -> None:
    """torchft listens on all interfaces. Whoever reaches its ports can take part in the training."""

    class Server(http._IPv6HTTPServer):
        address_family = socket.AF_INET

        def __init__(self, _: object, handler: object) -> None:
            super().__init__((address, 0), handler)

    manager_server = torchft.manager.ManagerServer
    torchft.manager.ManagerServer = lambda **options: manager_server(**{**options, "bind": f"{address}:0"})
    http._IPv6HTTPServer, socket.gethostname = Server, lambda: address


def train(worker: int, lighthouse: str, steps: int = STEPS, *, dies: bool = False) -> int:
    """Train as one of the workers, from the others' step on. Return the number of workers of the last step."""
    torch.set_num_threads(1)
    listen_on(ADDRESS)
    torch.manual_seed(worker)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    sgd = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    store = dist.TCPStore(ADDRESS, 0, is_master=True, wait_for_workers=False)

    def save() -> dict:
        return {"model": model.state_dict(), "sgd": sgd.state_dict()}

    def load(state: dict) -> None:
        model.load_state_dict(state["model"])
        sgd.load_state_dict(state["sgd"])

    manager = torchft.Manager(
        pg=ProcessGroupGloo(timeout=SECONDS), load_state_dict=load, state_dict=save, min_replica_size=2,
        use_async_quorum=False, timeout=SECONDS, rank=0, world_size=1, store_addr=ADDRESS, store_port=store.port,
        lighthouse_addr=lighthouse, replica_id=f"worker{worker}", hostname=ADDRESS,
    )  # fmt: skip
    ddp_model = DistributedDataParallel(model, process_group=ProcessGroupDummy(0, 1), find_unused_parameters=True)
    attach(ddp_model, manager=manager, rank=4)
    optimizer = torchft.Optimizer(manager, sgd)
    while manager.current_step() < steps:
        optimizer.zero_grad()  # a quorum: the workers of this step
        if dies and manager.current_step() >= FATAL:
            os.kill(os.getpid(), signal.SIGKILL)
        inputs = torch.randn(16, 32)
        loss = nn.functional.mse_loss(ddp_model(inputs), inputs.roll(1, dims=1))
        loss.backward()
        optimizer.step()  # a vote: the step is not applied if a worker was lost
        time.sleep(0.02)
    workers = manager.num_participants()
    time.sleep(2)  # the others vote
    manager.shutdown()
    return workers


def start(event: object, worker: int, *arguments: object, **options: object) -> None:
    """Train in a process of its own after the event."""
    event.wait()
    workers = train(worker, *arguments, **options)
    print(f"worker {worker}: step {STEPS} with {workers} workers", flush=True)
    os._exit(0)  # torchft's threads would go on


if __name__ == "__main__":
    server = LighthouseServer(bind=f"{ADDRESS}:0", min_replicas=2, heartbeat_timeout_ms=1000)
    lighthouse = f"http://{ADDRESS}:{server.address().rsplit(':', 1)[1]}"
    context = multiprocessing.get_context("spawn")
    now, later = context.Event(), context.Event()
    workers = [
        context.Process(target=start, args=(now, worker, lighthouse), kwargs={"dies": worker == 2})
        for worker in range(3)
    ]
    spare = context.Process(target=start, args=(later, 3, lighthouse))
    for process in [*workers, spare]:
        process.start()
    now.set()
    workers[2].join()
    later.set()
    for process in [*workers, spare]:
        process.join()
