"""Train the ConvNet on two Gloo ranks as PyTorch's DDP tutorial writes it; started by torchrun."""

import torch
import torch.distributed as dist
from common import LEARNING_RATE, convnet, measure, options
from images import Images
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def main() -> None:
    asked = options()
    dataset = Images(asked.data_dir)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=64, shuffle=False, sampler=sampler)
    model = DistributedDataParallel(convnet())
    loss_function = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)

    def train_epoch(epoch: int) -> int:
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = loss_function(model(inputs), targets)
            loss.backward()
            optimizer.step()
        return len(dataset)

    measure(train_epoch, asked.epochs)


dist.init_process_group(backend="gloo")
main()
dist.barrier()
dist.destroy_process_group()
