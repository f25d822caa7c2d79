// The way back: one button, the version typed, the run's release key. The key leaves this field for one request only.

import { useEffect, useRef, useState } from "preact/hooks";

import { postJson } from "../api";
import { messageOf } from "../resource";
import type { Releases } from "./data";

interface RollbackProps {
  readonly run: string;
  readonly releases: Releases;
  readonly onDone: () => void;
}

export function Rollback({ run, releases, onDone }: RollbackProps) {
  const [isOpen, setOpen] = useState(false);
  const [asked, setAsked] = useState<number | null>(null);
  const request = releases.requests.find(({ number }) => number === asked);
  const { due } = releases;
  return (
    <div class="live-back">
      <button type="button" class="live-danger" disabled={due === null} onClick={() => setOpen(true)}>
        Roll back{due === null ? "" : ` version ${due}`}
      </button>
      <p class="note" role="status">
        {request !== undefined ? request.outcome || "Asked for; the process “release” answers within a second." : why(releases)}
      </p>
      {isOpen && due !== null && (
        <Dialog
          run={run}
          due={due}
          releases={releases}
          onClose={() => setOpen(false)}
          onAsked={(number) => {
            setAsked(number);
            setOpen(false);
            onDone();
          }}
        />
      )}
    </div>
  );
}

function why({ due, way, live, former }: Releases): string {
  if (due === null) return live === null ? "Nothing has been released." : "It is the first release: there is no earlier one.";
  return way !== null ? `Takes it from its way to users; version ${live ?? "–"} stays.` : `Users get version ${former} again.`;
}

interface DialogProps {
  readonly run: string;
  readonly due: number;
  readonly releases: Releases;
  readonly onClose: () => void;
  readonly onAsked: (request: number) => void;
}

function Dialog({ run, due, releases, onClose, onAsked }: DialogProps) {
  const dialog = useRef<HTMLDialogElement>(null), key = useRef<HTMLInputElement>(null);
  const [typed, setTyped] = useState(""), [by, setBy] = useState(""), [error, setError] = useState("");
  const [isBusy, setBusy] = useState(false);
  useEffect(() => dialog.current?.showModal(), []);
  const isRight = typed.trim() === String(due);
  const send = async (event: Event) => {
    event.preventDefault();
    if (!isRight || key.current === null) return;
    setBusy(true);
    setError("");
    const secret = key.current.value.trim();
    key.current.value = "";
    try {
      const answer = await postJson<{ request: number }>(`/runs/${encodeURIComponent(run)}/live/rollback`, { version: due, by: by.trim() }, secret);
      onAsked(answer.request);
    } catch (failure) {
      setError(messageOf(failure));
      key.current?.focus();
    } finally {
      setBusy(false);
    }
  };
  return (
    <dialog ref={dialog} class="live-dialog" aria-labelledby="rollback-title" onClose={onClose}>
      <form onSubmit={send}>
        <h2 id="rollback-title">Roll back version {due}</h2>
        <p>{why(releases)} It is recorded with your name. The trainer goes back, too, where release.revert says so.</p>
        <label>
          Type the version, {due}
          <input inputMode="numeric" autocomplete="off" value={typed} onInput={(event) => setTyped(event.currentTarget.value)} required />
        </label>
        <label>
          Your name
          <input autocomplete="name" maxLength={100} value={by} onInput={(event) => setBy(event.currentTarget.value)} required />
        </label>
        <label>
          Release key
          <input ref={key} type="password" autocomplete="off" required aria-describedby="rollback-key" />
        </label>
        <p class="note" id="rollback-key">
          <code>etude keys derive RUN release</code> prints it. It is sent with this one request and kept nowhere.
        </p>
        {error && (
          <p class="live-error" role="alert">
            {error}
          </p>
        )}
        <div class="live-actions">
          <button type="button" onClick={() => dialog.current?.close()}>
            Cancel
          </button>
          <button type="submit" class="live-danger" disabled={!isRight || by.trim() === "" || isBusy}>
            Roll back version {due}
          </button>
        </div>
      </form>
    </dialog>
  );
}
