"""PyTorch Geometric: graph classification, its `DataLoader` of graphs with two workers, and a GIN."""

import torch
from generated import seed, tell
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GIN, global_add_pool


def graph(index):
    """Return a random graph; one of class 1 has more edges."""
    generator, label = torch.Generator().manual_seed(index), index % 2
    edges = torch.randint(40, (2, 60 + 60 * label), generator=generator)
    return Data(x=torch.rand(40, 16, generator=generator), edge_index=edges, y=torch.tensor([label]))


class Classifier(torch.nn.Module):
    """Classifies graphs."""

    def __init__(self):
        super().__init__()
        self.gin, self.head = GIN(16, 128, num_layers=3), torch.nn.Linear(128, 2)

    def forward(self, batch):
        return self.head(global_add_pool(self.gin(batch.x, batch.edge_index), batch.batch))


if __name__ == "__main__":
    seed()
    loader = DataLoader([graph(index) for index in range(2000)], batch_size=50, shuffle=True, num_workers=2)
    model = Classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(3):
        for batch in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(batch), batch.y)
            loss.backward()
            optimizer.step()
        tell(loss)
