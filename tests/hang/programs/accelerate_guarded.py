"""hung rank-guarded-collective 0: only the main process of Accelerate waits for everyone."""

import torch
from accelerate import Accelerator


def save(acc, model):
    acc.wait_for_everyone()
    acc.save(acc.unwrap_model(model).state_dict(), "/tmp/mldebug_acc.pt")


def main():
    acc = Accelerator(cpu=True)
    model = torch.nn.Linear(8, 1)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.ones(64, 8), batch_size=4)
    model, opt, loader = acc.prepare(model, opt, loader)
    for step, x in enumerate(loader):
        loss = model(x).sum()
        acc.backward(loss)
        opt.step()
        opt.zero_grad()
        if step == 2 and acc.is_main_process:
            save(acc, model)


main()
