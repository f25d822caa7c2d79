// Things that can wait: values that change every second, and what is below the first screen.

import { useEffect, useRef, useState } from "preact/hooks";

const SLOW_MS = 5000;

/** A value that changes every second, seen every few seconds: for what costs the server more than a glance. */
export function useSlow(value: number): number {
  const [slow, setSlow] = useState(value);
  const newest = useRef(value);
  newest.current = value;
  useEffect(() => {
    const timer = setInterval(() => setSlow(newest.current), SLOW_MS);
    return () => clearInterval(timer);
  }, []);
  return slow;
}

/** False until what is ready has been painted: the curve is there before all else is drawn. */
export function useLater(isReady: boolean): boolean {
  const [isLater, setLater] = useState(false);
  useEffect(() => {
    if (!isReady) return;
    let timer = 0;
    const frame = requestAnimationFrame(() => (timer = window.setTimeout(() => setLater(true))));
    return () => {
      cancelAnimationFrame(frame);
      clearTimeout(timer);
    };
  }, [isReady]);
  return isLater;
}
