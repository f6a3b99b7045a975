"""The real `train` flow as a deployment, executed in processes of its own."""

from cairn.flows.train import train

if __name__ == "__main__":
    train.serve(name="chaos", pause_on_shutdown=False, print_starting_message=False)
