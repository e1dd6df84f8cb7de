import pytest
import torch
from torch import nn

from lean_laguna.models.packing import lay_out_experts, pack_rows, stack_rows


@pytest.mark.parametrize("width", [4, 64])
def test_packed_parameters_keep_name_shape_and_values_and_share_one_storage(width):
    parameters = [nn.Parameter(torch.randn(*shape, width)) for shape in ((3,), (2, 5), (7,))]
    before = [parameter.detach().clone() for parameter in parameters]
    joint = pack_rows(parameters)
    assert joint.shape == (20, width)
    assert torch.equal(joint, torch.cat([part.flatten(0, -2) for part in before]))
    for parameter, values in zip(parameters, before, strict=True):
        assert torch.equal(parameter, values)
        assert parameter.untyped_storage().data_ptr() == joint.untyped_storage().data_ptr()


def test_a_step_of_training_reaches_the_joint_weight():
    parameters = [nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(1, 3))]
    joint = pack_rows(parameters)
    with torch.no_grad():
        parameters[1].add_(1)
    assert joint[2].eq(2).all()


def test_one_large_weight_stays_where_it_is():
    parameter = nn.Parameter(torch.empty(4096, 1024))
    assert pack_rows([parameter]) is parameter


def test_experts_lie_transposed_one_by_one():
    parameter = nn.Parameter(torch.randn(3, 4, 5))
    before = parameter.detach().clone()
    lay_out_experts(parameter)
    assert torch.equal(parameter, before)
    assert parameter[1].t().is_contiguous()


def test_stacked_rows_keep_their_values_and_are_not_moved_twice():
    first, second = (torch.nn.Parameter(torch.randn(n, 6)) for n in (4, 3))
    expected = torch.cat((first, second)).detach().clone()
    joint = stack_rows([first, second])
    assert torch.equal(joint, expected)
    assert torch.equal(torch.cat((first, second)), expected)
    assert first.data_ptr() == joint.data_ptr()
    again = stack_rows([first, second])
    assert again.data_ptr() == joint.data_ptr()
    assert torch.equal(again, expected)
