"""REINFORCE: a policy learns to walk to the end of a corridor; one optimizer step per episode."""

import torch
from generated import seed, tell

LENGTH, EPISODES, MOST = 8, 150, 60

if __name__ == "__main__":
    seed()
    policy = torch.nn.Sequential(torch.nn.Linear(LENGTH, 128), torch.nn.ReLU(), torch.nn.Linear(128, 2))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    for episode in range(EPISODES):
        place, chances, rewards = 0, [], []
        while place < LENGTH - 1 and len(rewards) < MOST:
            choice = torch.distributions.Categorical(logits=policy(torch.eye(LENGTH)[place]))
            action = choice.sample()
            chances.append(choice.log_prob(action))
            place = max(0, place + (1 if action.item() == 1 else -1))
            rewards.append(1.0 if place == LENGTH - 1 else -0.05)
        returns, total = [], 0.0
        for reward in reversed(rewards):
            total = reward + 0.99 * total
            returns.insert(0, total)
        loss = -(torch.stack(chances) * torch.tensor(returns)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if episode % 50 == 49:
            tell(loss)
