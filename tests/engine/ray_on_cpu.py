"""A platform for tests: vLLM's CPU one, on which Ray hands out processes as it hands out GPUs.

vLLM 0.32 leaves CPU without a name for what Ray hands out. All else of its Ray executor runs there.
vLLM finds platforms by entry points, as `entry_point` writes one.
"""

from pathlib import Path

from vllm.platforms.cpu import CpuPlatform


class RayOnCpu(CpuPlatform):
    ray_device_key = "GPU"


def platform() -> str:
    return f"{__name__}.{RayOnCpu.__name__}"


def entry_point(folder: Path) -> Path:
    """Writes what an installed package leaves in a folder of the Python path."""
    installed = folder / "ray_on_cpu-0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: ray_on_cpu\nVersion: 0\n")
    group = f"[vllm.platform_plugins]\nray_on_cpu = {__name__}:{platform.__name__}\n"
    (installed / "entry_points.txt").write_text(group)
    return folder
