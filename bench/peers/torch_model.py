"""WHAT do the peers of PyTorch train? Document 000's model, as src/paceline/models/mlp.py has it."""

import numpy as np
import torch
from torch import nn


def model_of_document_000() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(784, 100), nn.Sigmoid(), nn.Linear(100, 10))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for layer in model:
            if isinstance(layer, nn.Linear):
                layer.weight.normal_(0.0, 1.0, generator=generator)
                layer.bias.zero_()
    return model


def arrays(model: nn.Module) -> list[np.ndarray]:
    """A copy of the parameters, in the shape that speaking.py looks at."""
    return [parameter.detach().numpy().T.copy() for parameter in model.parameters()]


def flatten(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """All parameters, and all gradients, as one vector each; those of the model are views of them."""
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    gradients = torch.zeros_like(flat)
    nn.utils.vector_to_parameters(flat, model.parameters())
    begin = 0
    for parameter in model.parameters():
        parameter.grad = gradients[begin : begin + parameter.numel()].view_as(parameter)
        begin += parameter.numel()
    return flat, gradients
