import platform

import pytest
import torch

from tune_model.package.fingerprints import CpuSystem
from tune_model.package.system import DeviceError, choose_device, probe_system, read_cpuinfo

X86 = """processor\t: 0
vendor_id\t: AuthenticAMD
model name\t: AMD EPYC 9554 64-Core Processor
flags\t\t: fpu avx2 avx512_bf16 fma

processor\t: 1
model name\t: other
flags\t\t: fpu
"""
ARM = "processor\t: 0\nFeatures\t: fp asimd bf16\nCPU implementer\t: 0x41\n"


def test_flags_and_name_of_the_first_processor():
    assert read_cpuinfo(X86) == (frozenset({"fpu", "avx2", "avx512_bf16", "fma"}), "AMD EPYC 9554 64-Core Processor")
    assert read_cpuinfo(ARM) == (frozenset({"fp", "asimd", "bf16"}), "")
    assert read_cpuinfo("") == (frozenset(), "")


def test_this_machine():
    system = probe_system("cpu")
    assert isinstance(system, CpuSystem)
    assert system.machine == platform.machine()
    assert system.threads == torch.get_num_threads()
    assert torch.__version__.startswith(system.torch)


def test_devices():
    assert choose_device(None, "cpu") == torch.device("cpu")
    assert choose_device("cpu", "cuda") == torch.device("cpu")
    with pytest.raises(DeviceError, match="expected cpu, cuda or cuda:N"):
        choose_device("gpu", "cuda")
    with pytest.raises(DeviceError, match="device is 'meta'; expected cpu, cuda or cuda:N"):
        choose_device("meta", "cpu")  # a model without values was loaded
    with pytest.raises(DeviceError, match="is not there"):
        choose_device("cuda:99", "cuda")
