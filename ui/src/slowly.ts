// A value that changes at most so often: what is asked for anew with it costs the server little.

import { useEffect, useRef, useState } from "preact/hooks";

export function useSlowly<T>(value: T, ms: number): T {
  const [shown, setShown] = useState(value);
  const changed = useRef(0);
  useEffect(() => {
    const wait = Math.max(0, changed.current + ms - Date.now());
    const timer = setTimeout(() => {
      changed.current = Date.now();
      setShown(value);
    }, wait);
    return () => clearTimeout(timer);
  }, [value, ms]);
  return shown;
}
