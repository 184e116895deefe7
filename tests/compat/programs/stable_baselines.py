"""Stable-Baselines3: `PPO.learn` on Gymnasium's cart pole; it makes its batches itself."""

from generated import seed, tell
from stable_baselines3 import PPO

if __name__ == "__main__":
    seed()
    model = PPO("MlpPolicy", "CartPole-v1", n_steps=512, batch_size=64, n_epochs=5, seed=0, device="cpu")
    model.learn(3000)
    tell(model.logger.name_to_value["train/loss"])
    tell(model.logger.name_to_value["train/value_loss"])
