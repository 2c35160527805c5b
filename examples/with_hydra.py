"""Settings from Hydra: `python examples/with_hydra.py lr=0.01`; `-m lr=0.01,0.001` trains twice."""

import hydra
from omegaconf import DictConfig, OmegaConf

import samestep


@hydra.main(version_base=None, config_path=".", config_name="with_hydra")
def main(config: DictConfig) -> float:
    """Train with what Hydra has composed; return what its sweepers compare."""
    run = samestep.train(**OmegaConf.to_container(config, resolve=True))
    return run.result["best"]["value"]


if __name__ == "__main__":
    main()
